"""Keys and values between slices: the order that is asked for, and what is freed when."""

import pytest
import torch

from lightning_decentral.pipeline.compute.kv_cache import KVCache, LayerRows

BOUNDS = [(0, 3), (3, 4), (4, 7)]


def prefixes(store, parts):
    return [store.extend(part, *bounds) for part, bounds in zip(parts, BOUNDS, strict=True)]


def parts():
    whole = torch.randn(2, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [whole[:, a:b].clone().requires_grad_() for a, b in BOUNDS]


def test_gradients_are_those_of_concatenation():
    weights = [torch.randn(2, b, 4, dtype=torch.float64) for _, b in BOUNDS]
    cut, joined = parts(), parts()
    for prefix, weight in reversed(list(zip(prefixes(LayerRows(7), cut), weights, strict=True))):
        (prefix.sin() * weight).sum().backward()
    wholes = [torch.cat(joined[: i + 1], dim=1) for i in range(3)]
    sum((whole.sin() * weight).sum() for whole, weight in zip(wholes, weights, strict=True)).backward()
    for a, b in zip(cut, joined, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-14, atol=1e-15)


def test_the_first_slice_may_not_come_back_first():
    first, _, _ = prefixes(LayerRows(7), parts())
    with pytest.raises(RuntimeError, match=r"slice 0..3 runs backward before slice ..7: last slice first"):
        first.sum().backward()


def test_a_slice_may_not_come_before_its_context():
    with pytest.raises(AssertionError, match=r"slice 3..4 came before its context, known are 0 tokens"):
        LayerRows(7).extend(torch.zeros(1, 1, 4), 3, 4)


def test_writing_again_changes_nothing():
    store = LayerRows(7)
    ours = parts()
    found = prefixes(store, ours)
    before = store.rows.clone()
    store.write(ours[1].detach(), *BOUNDS[1])
    assert torch.equal(store.rows, before)
    assert torch.equal(found[2].detach(), torch.cat(ours, dim=1))


def rows(memory):
    """All that are held."""
    return [store.rows for stores in memory.stores.values() for store in stores if store.rows is not None]


def test_rows_are_freed_once_the_first_slice_is_back():
    memory = KVCache(7)
    found = [memory.at(*bounds).update(part, part, 0) for part, bounds in zip(parts(), BOUNDS, strict=True)]
    assert sum(row.nbytes for row in rows(memory)) == 2 * 2 * 7 * 4 * 8
    for keys, values in reversed(found):
        (keys.sum() + values.sum()).backward()
    assert rows(memory) == []


def test_one_slice_is_handed_through():
    new = torch.zeros(1, 7, 4)
    assert LayerRows(7).extend(new, 0, 7) is new


def test_positions_of_a_slice():
    view = KVCache(7).at(3, 5)
    assert (view.get_seq_length(), view.get_query_offset(), view.get_mask_sizes(2)) == (3, 3, (5, 0))
