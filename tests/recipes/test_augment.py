"""Image transforms against brute force on small images."""

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_decentral.recipes.augment import (
    CenterCrop,
    Normalise,
    RandomCrop,
    RandomFlip,
    RandomResizedCrop,
    Resize,
    chain,
)


@pytest.fixture
def image():
    return torch.rand(3, 6, 8, generator=torch.Generator().manual_seed(0))


def test_normalise_of_known_moments(image):
    mean, std = image.mean((1, 2)), image.std((1, 2))
    normal = Normalise(mean.tolist(), std.tolist())(image)
    assert normal.mean((1, 2)).tolist() == pytest.approx([0, 0, 0], abs=1e-6)
    assert normal.std((1, 2)).tolist() == pytest.approx([1, 1, 1], rel=1e-5)


def test_flip_gives_both_images_and_no_other(image):
    flips = [RandomFlip()(image) for _ in range(40)]
    mirrored = [torch.equal(flip, image.flip(-1)) for flip in flips]
    assert 5 < sum(mirrored) < 35
    assert all(torch.equal(flip, image) for flip, is_mirrored in zip(flips, mirrored, strict=True) if not is_mirrored)


def test_crop_is_one_of_all_shifts(image):
    bordered = torch.zeros(3, 10, 12)
    bordered[:, 2:8, 2:10] = image
    shifts = {(t, left): bordered[:, t : t + 6, left : left + 8] for t in range(5) for left in range(5)}
    found = set()
    for _ in range(400):
        crop = RandomCrop(2)(image)
        found |= {shift for shift, expected in shifts.items() if torch.equal(crop, expected)}
    assert found == set(shifts)


def test_resize_is_pillows_bilinear(image):
    rows = (image[0] * 255).round().to(torch.uint8).numpy()
    pillow = np.asarray(Image.fromarray(rows.astype(np.float32)).resize((4, 3), Image.Resampling.BILINEAR))
    ours = Resize(3)(torch.from_numpy(rows.astype(np.float32))[None])
    assert ours.shape == (1, 3, 4)
    assert torch.allclose(ours[0], torch.from_numpy(pillow.copy()), atol=1e-2)


def test_center_crop_is_the_middle(image):
    assert torch.equal(CenterCrop(4)(image), image[:, 1:5, 2:6])


def test_resized_crop_of_a_ramp_is_a_part_of_the_ramp():
    ramp = torch.linspace(0, 1, 64).expand(1, 64, 64)
    crops = [RandomResizedCrop(16)(ramp) for _ in range(50)]
    spans = torch.stack([crop.max() - crop.min() for crop in crops])
    assert all(crop.shape == (1, 16, 16) and (crop.diff(dim=-1) > 0).all() for crop in crops)
    # 8 % of the area and 3:4 is at least 0.24 of the width; the resampled ends lie half a pixel inside.
    assert spans.min() > 0.24 * 14 / 16
    assert spans.max() > 0.6


def test_random_transforms_repeat_with_the_seed(image):
    def draw():
        torch.manual_seed(3)
        return chain([RandomCrop(2), RandomFlip(), RandomResizedCrop(5)], image)

    assert torch.equal(draw(), draw())
