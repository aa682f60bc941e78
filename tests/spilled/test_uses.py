"""What users and their callbacks see of spilling, and what is refused."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_decentral import SpilledStrategy
from tests.spilled.spilling import (
    WIDTH,
    Chain,
    batches,
    dataset,
    fit,
    least_bytes,
    recipe,
    rows,
    same_states,
    trainer,
)
from tests.tiny import Net


class Looks(Callback):
    """Gradients and parameters as any callback finds them, and a forward between two steps."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.own = list(pl_module.parameters())

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.rows.append([p.grad.clone() for p in pl_module.parameters() if p.grad is not None])

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert all(a is b for a, b in zip(self.own, pl_module.parameters(), strict=True))
        pl_module.eval()
        self.rows.append([pl_module(torch.ones(1, 8)).detach()])
        pl_module.train()


def test_hooks_see_parameters_and_gradients_and_the_module_keeps_no_trace() -> None:
    seen = []
    for strategy in (SpilledStrategy(), "auto"):
        module, looks = Net(), Looks()
        fit(module, dataset(module), strategy, callbacks=[looks])
        seen.append(looks.rows)
        assert module.trainer.optimizers[0].param_groups[0]["params"][0] is looks.own[0]
        assert all(part._compiled_call_impl is None for part in module.modules())
    assert len(seen[0]) == len(seen[1]) == 12
    assert all(torch.equal(a, b) for x, y in zip(*seen, strict=True) for a, b in zip(x, y, strict=True))


def test_the_start_says_what_will_happen(caplog: pytest.LogCaptureFixture) -> None:
    budget = least_bytes("gpt")
    caplog.clear()
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        fit(recipe("gpt"), batches("gpt"), SpilledStrategy(memory_bytes=budget), limit_val_batches=0)
        spilled = caplog.text
        caplog.clear()
        fit(recipe("gpt"), batches("gpt"), SpilledStrategy(memory_bytes=10**8), limit_val_batches=0)
    for words in ("shards: ", "shard 1: network.transformer", "peak: ", "predicted", "lost to loading"):
        assert words in spilled
    assert "use the plain strategy" not in spilled
    assert "the model fits: use the plain strategy" in caplog.text


def test_a_model_is_made_on_the_host() -> None:
    strategy = SpilledStrategy()
    strategy._root_device = torch.device("meta")
    with strategy.tensor_init_context():
        assert torch.zeros(1).device.type == "cpu"
    assert strategy.root_device.type == "meta"


def test_the_name_is_registered() -> None:
    assert isinstance(trainer("spilled").strategy, SpilledStrategy)


# ---- refusals --------------------------------------------------------------------------------------------------------


class InPlace(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(3)])
        self.first = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(self.first(batch[0])).square().mean()


class Counted(nn.Linear):
    """Remembers, where nothing can put it back, how often it was called."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.numbers = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.numbers)


class Remembers(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = Counted(WIDTH, WIDTH)


class Grows(Counted):
    """As a cache that is passed along does."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight[:, : WIDTH + 1 - next(self.numbers)])


class Caches(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = Grows(WIDTH, WIDTH)


class Regularized(Chain):
    """Uses a parameter beside the module that holds it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.layers[1].weight.square().sum()


class Manual(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Compiled(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1]._compiled_call_impl = self.layers[1]._call_impl  # what compile() sets


class Opaque(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(hidden=super().forward(x))


class Wraps(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Opaque(WIDTH, WIDTH) for _ in range(3)])  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = batch[0]
        for layer in self.layers:
            hidden = layer(hidden).hidden
        return hidden.square().mean()


class Board:
    """A place where blocks leave what they computed for each other."""

    def __init__(self, *written: Tensor) -> None:
        self.written = list(written)


class Writes(nn.Linear):
    def forward(self, x: Tensor, board: Any = None) -> Tensor:
        y = super().forward(x)
        board.written.append(y)
        return y


class Reads(nn.Linear):
    def forward(self, x: Tensor, board: Any = None) -> Tensor:
        return super().forward(x + board.written[0])


class Counts(nn.Linear):
    def forward(self, x: Tensor, board: Any = None) -> Tensor:
        board["written"] = board["written"] + 1
        return super().forward(x)


class Adds(nn.Linear):
    """Writes in place to what it is given within an object."""

    def forward(self, x: Tensor, board: Any = None) -> Tensor:
        board.written[0].add_(1)
        return super().forward(x)


class Boards(Chain):
    block: type[nn.Linear] = Writes

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.block(WIDTH, WIDTH) for _ in range(2)])  # type: ignore[assignment]

    def board(self, x: Tensor) -> Any:
        return Board()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        board, x = self.board(batch[0]), batch[0]
        for layer in self.layers:
            x = layer(x, board=board)
        return x.square().mean()


class BoardIsRead(Boards):
    block = Reads

    def board(self, x: Tensor) -> Any:
        return Board(x.clone().requires_grad_())


class BoardIsADictionary(Boards):
    block = Counts

    def board(self, x: Tensor) -> Any:
        return {"written": 0}


class BoardInPlace(Boards):
    block = Adds

    def board(self, x: Tensor) -> Any:
        return Board(torch.zeros(1))


class KeysAndValues(Board):
    def update(self, x: Tensor) -> Tensor:
        self.written.append(x)
        return torch.cat(self.written)

    def get_seq_length(self) -> int:
        return len(self.written)


class OneCacheForAll(Boards):
    """Goes on in each step with the cache of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KeysAndValues()

    def board(self, x: Tensor) -> Any:
        return self.cache


@pytest.mark.parametrize(("module", "options", "message"), [
    (InPlace, {}, "block layers.0 changes its input in place"),
    (Remembers, {}, "block layers.2 gives another result when its backward runs it again. Keep"),
    (Caches, {}, r"block layers.2 gives another result .*again \(.*use_cache=False"),
    (Wraps, {}, "block layers.0 returns a SimpleNamespace, in which gradients can't be found"),
    (Boards, {}, r"block layers.0 writes into a Board among its arguments, .*use_cache=False"),
    (BoardInPlace, {}, r"block layers.0 writes into a Board among its arguments, .*use_cache=False"),
    (BoardIsADictionary, {}, r"block layers.0 writes into a dict among its arguments, .*use_cache=False"),
    (BoardIsRead, {}, r"block layers.0 gets a Board with tensors that need gradients, .*use_cache=False"),
    (OneCacheForAll, {}, r"block layers.0 gets the same KeysAndValues again, .*use_cache=False"),
    (Regularized, {}, r"parameter layers.1.weight is used outside .*resident=\['layers.1.weight'\]"),
    (Manual, {}, "Manual optimizes manually"),
    (Compiled, {}, "layers.1 is compiled"),
    (Chain, {"blocks": ["layers.7"]}, "no module named 'layers.7' in Chain: known are layers, layers.0"),
    (Chain, {"resident": ["coffee"]}, "no module named 'coffee' in Chain"),
    (Chain, {"blocks": ["layers", "layers.1"]}, "block layers.1 lies within another block"),
    (Chain, {"blocks": "coffee"}, "blocks must be 'auto' or names of modules, got 'coffee'"),
    (Chain, {"memory_bytes": 4 * WIDTH * WIDTH - 1}, "block layers.0 has 16384 bytes of parameters alone, .*=16383: "),
    (Chain, {"memory_bytes": 2 * 4 * WIDTH * WIDTH}, "block layers.* needs .*memory_bytes=32768"),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_wrong_uses_are_refused(module: type[LightningModule], options: dict[str, Any], message: str) -> None:
    made = module()
    before = [part._compiled_call_impl for part in made.modules()]
    with pytest.raises(ValueError, match=message):
        fit(made, rows(), SpilledStrategy(**options), limit_val_batches=0)
    assert [part._compiled_call_impl for part in made.modules()] == before
    assert all(p.isfinite().all() for p in made.parameters()), "the host's own are back"


@pytest.mark.parametrize("resident", ["layers.1", "layers.1.weight"])
def test_what_is_used_beside_its_module_can_stay(resident: str) -> None:
    torch.manual_seed(2)
    loader = rows()
    spilled = fit(Regularized(), loader, SpilledStrategy(resident=[resident]), limit_val_batches=0)
    assert same_states(spilled, fit(Regularized(), loader, limit_val_batches=0))


def test_a_lazy_module_is_refused() -> None:
    class Lazy(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.LazyLinear(1)

    with pytest.raises(ValueError, match="a lazy module has uninitialized parameters: run one batch through it"):
        fit(Lazy(), rows(), SpilledStrategy(), limit_val_batches=0)


def test_wrong_places_and_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"trains on one device, got 2: give devices=1"):
        trainer(SpilledStrategy(), devices=2)
    with pytest.raises(ValueError, match="memory_bytes must be positive, got 0"):
        SpilledStrategy(memory_bytes=0)
    with pytest.raises(ValueError, match=r"can.t copy to mps"):
        SpilledStrategy().parallel_devices = [torch.device("mps")]
