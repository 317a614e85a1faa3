"""What a model keeps of an embedding's weight when its rows move: it raises, and nothing else."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer import DistributedEmbedding, fleet
from transpiler import DistributedStrategy

IDS = torch.tensor([[0, 3], [4, 3]])


class Net(nn.Module):
    """An embedding, and a list that keeps its weight for a penalty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.emb = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 2)
        self.penalties: list[Any] = [([self.out.weight, self.emb.weight], 0.1)]

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.out(self.emb(ids).sum(1))
        return logits


def moved(model: nn.Module) -> Any:
    """The model in a job of this process alone, with its embedding moved."""
    fleet.init()
    fleet.distribute_embedding(model.emb)
    return fleet.distributed_model(model)


def clip(weight: Tensor) -> None:
    nn.utils.clip_grad_norm_([weight], 1.0)


def write(weight: Tensor) -> None:
    weight[0] = 1.0


def assign_gradient(weight: Tensor) -> None:
    weight.grad = torch.ones(5, 3)


def assign_data(weight: Tensor) -> None:
    weight.data = torch.ones(5, 3)


USES: dict[str, Callable[[Any], object]] = {
    "a square": torch.square,
    "a product": lambda w: 2 * w,
    "a norm": lambda w: w.norm(),
    "a sum": torch.sum,
    "a sum of several": lambda w: torch.cat([torch.ones(1, 3), w]),
    "an output layer": lambda w: F.linear(torch.ones(2, 3), w),
    "a matrix product": lambda w: torch.ones(2, 3) @ w.T,
    "a functional lookup": lambda w: F.embedding(IDS, w),
    "a functional bag": lambda w: F.embedding_bag(IDS, w),
    "an index": lambda w: w[0],
    "an iteration": list,
    "a copy": lambda w: w.detach().clone(),
    "data": lambda w: w.data,
    "numpy": np.asarray,
    "a list of numbers": lambda w: w.tolist(),
    "a parameter of it": nn.Parameter,
    "an initialization": nn.init.normal_,
    "an assignment": write,
    "a write in place": lambda w: w.copy_(torch.ones(5, 3)),
    "an assignment of data": assign_data,
    "its gradient": lambda w: w.grad,
    "an assigned gradient": assign_gradient,
    "clipping": clip,
    "an older optimizer's step": lambda w: torch.optim.SGD([w], lr=0.1).step(),
    "an older optimizer's zeroing": lambda w: torch.optim.SGD([w], lr=0.1).zero_grad(),
    "a list of tensors": lambda w: torch._foreach_norm([w]),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", USES)
def test_a_use_of_a_moved_weight_says_what_to_write(name: str, grad: bool) -> None:
    """Whatever reads or writes values or gradient raises, with and without autograd, and names the
    embedding, the place that keeps the weight, and what to write.
    """
    model = moved(Net())
    place = r"embedding 'emb': .* the model keeps in penalties\[0\]\[0\]\[1\]\."
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=place) as raised:
        USES[name](model.penalties[0][0][1])
    assert "weight_decay=2 * c" in str(raised.value)


def test_a_gradient_that_arrives_at_a_moved_weight_raises() -> None:
    """A penalty computed before the move, and its backward after it."""
    model = Net()
    penalty = model.emb.weight.square().sum()
    moved(model)
    with pytest.raises(RuntimeError, match="a gradient arrived at the weight that it had"):
        penalty.backward()


def test_a_moved_weight_tells_its_shape_and_holds_no_memory() -> None:
    """Shape, dtype and device are as before, its class is a parameter's; one number is left."""
    before, weight = Net().emb.weight, moved(Net()).penalties[0][0][1]
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf"):
        assert getattr(weight, name) == getattr(before, name)
    assert (len(weight), weight.numel(), weight.size(1), weight.dim()) == (5, 15, 3, 2)
    assert isinstance(weight, nn.Parameter) and isinstance(weight, Tensor)
    weight.grad = None
    weight.requires_grad_(False)
    assert repr(weight) == f"{weight}" == "MovedWeight of embedding 'emb', [5, 3]"
    with torch._C.DisableTorchFunctionSubclass():
        assert weight.untyped_storage().nbytes() == 4


def test_copies_of_a_model_keep_moved_weights_as_such() -> None:
    """deepcopy and pickle."""
    model = moved(Net())
    file = io.BytesIO()
    torch.save(model.penalties, file)
    file.seek(0)
    for penalties in (copy.deepcopy(model).penalties, torch.load(file, weights_only=False)):
        assert penalties[0][0][1].shape == (5, 3)
        with pytest.raises(RuntimeError, match="embedding 'emb': its rows have moved"):
            torch.square(penalties[0][0][1])


def test_a_module_that_is_kept_besides_raises_too() -> None:
    """A list of modules is no registered child: its embedding is still torch's."""
    model = Net()
    model.also = [model.emb]
    model = moved(model)
    with pytest.raises(RuntimeError, match=r"functional.embedding .* also\[0\]\.weight"):
        model.also[0](IDS)


def test_a_distributed_embedding_says_what_takes_its_weights_place() -> None:
    """``emb.weight`` is an AttributeError, as hasattr needs it, with more words than Python's."""
    emb = DistributedEmbedding(3, name="words")
    assert not hasattr(emb, "weight") and not hasattr(emb, "nothing")
    with pytest.raises(AttributeError, match="table 'words' has no 'weight'.*weight_decay"):
        emb.weight  # noqa: B018  # the attribute is the test


# ---- what cannot move ----


def tied_to_a_layer(model: Net) -> None:
    model.out = nn.Linear(3, 5)
    model.out.weight = model.emb.weight


def in_a_parameter_list(model: Net) -> None:
    model.kept = nn.ParameterList([model.emb.weight])


def a_view(model: Net) -> None:
    model.first = {"rows": [model.emb.weight[:2]]}


def a_parameter_of_its_memory(model: Net) -> None:
    model.kept = nn.Parameter(model.emb.weight.data)


def a_buffer_of_its_memory(model: Net) -> None:
    model.register_buffer("kept", model.emb.weight.detach())


def normalized(model: Net) -> None:
    nn.utils.parametrizations.weight_norm(model.emb)


def pruned(model: Net) -> None:
    from torch.nn.utils import prune

    prune.l1_unstructured(model.emb, "weight", 0.5)


def with_another_forward(model: Net) -> None:
    model.emb.forward = lambda ids: 2 * F.embedding(ids, model.emb.weight)


def with_a_gradient_hook(model: Net) -> None:
    model.emb.weight.register_hook(lambda gradient: 2 * gradient)


def with_an_accumulation_hook(model: Net) -> None:
    model.emb.weight.register_post_accumulate_grad_hook(lambda weight: None)


def with_a_state_dict_hook(model: Net) -> None:
    model.emb.register_state_dict_post_hook(lambda *_: None)


def with_a_hook_on_loading(model: Net) -> None:
    model.emb.register_load_state_dict_pre_hook(lambda *_: None)


STAYS: dict[Callable[[Net], None], str] = {
    tied_to_a_layer: "its weight is also 'out.weight'",
    in_a_parameter_list: "its weight is also 'kept.0'",
    a_view: "first['rows'][0] is a view of its weight",
    a_parameter_of_its_memory: "kept is a view of its weight",
    a_buffer_of_its_memory: "kept is a view of its weight",
    normalized: "expected an nn.Embedding or nn.EmbeddingBag",
    pruned: "its weight is no plain parameter",
    with_another_forward: "it has a forward of its own",
    with_a_gradient_hook: "it has a hook on its weight",
    with_an_accumulation_hook: "it has a hook on its weight",
    with_a_state_dict_hook: "it has a hook on its state_dict",
    with_a_hook_on_loading: "it has a hook on load_state_dict",
}


@pytest.mark.parametrize("change", STAYS)
def test_an_embedding_that_is_more_than_its_rows_cannot_move(
    change: Callable[[Net], None],
) -> None:
    """What the rows elsewhere would not have is refused before anything moves."""
    model = Net()
    model.penalties = []
    fleet.init()
    fleet.distribute_embedding(model.emb)
    change(model)
    kind, before = type(model.emb), model.emb(IDS).detach()
    with pytest.raises(ValueError, match=rf"embedding 'emb': {re.escape(STAYS[change])}"):
        fleet.distributed_model(model)
    assert type(model.emb) is kind and torch.equal(model.emb(IDS), before)


def test_an_optimizer_that_was_made_before_the_move_is_refused() -> None:
    """It has the weight, and not the table."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moved(model)
    with pytest.raises(ValueError, match="make the optimizer with .*after fleet.distributed_model"):
        fleet.distributed_optimizer(optimizer)


def test_a_pattern_that_matches_nothing_names_what_there_is() -> None:
    """The embeddings of the model, each in quotes."""
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"embeddings": ["emb", "words*"]}
    fleet.init(strategy=strategy)
    with pytest.raises(ValueError, match=r"'words\*' matches no embedding .* it has 'emb'$"):
        fleet.distributed_model(Net())


# ---- what moves with an embedding ----


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of ids: torch says so, too
def test_hooks_move_with_an_embedding() -> None:
    """Those on forward and on backward see the same, and their handles remove them."""
    seen: list[Any] = []
    model = Net()
    handles = [
        model.emb.register_forward_pre_hook(lambda module, given: (given[0].flip(0),)),
        model.emb.register_forward_hook(lambda module, given, result: 2 * result),
        model.emb.register_full_backward_hook(lambda module, given, came: seen.append(came[0])),
    ]
    plain = copy.deepcopy(model)
    mine = moved(model)
    for each in (plain, mine):
        each(IDS).square().sum().backward()
    assert torch.equal(mine(IDS), plain(IDS)) and torch.equal(*seen)
    for handle in handles:
        handle.remove()
    assert torch.equal(mine.emb(IDS), 0.5 * plain.emb(IDS.flip(0)))


@pytest.mark.parametrize("registered_first", [0, 1])
def test_an_embedding_of_two_models_moves_once(registered_first: int) -> None:
    """Both look the same table up, whichever of them is registered first."""
    models = [Net(), Net()]
    models[1].emb = models[0].emb
    models[1].penalties = []
    fleet.init()
    fleet.distributed_model(models[registered_first])
    fleet.distribute_embedding(models[0].emb)
    fleet.distributed_model(models[1 - registered_first])
    assert isinstance(models[0].emb, DistributedEmbedding) and models[0].emb is models[1].emb


def test_a_weight_that_another_model_has_cannot_move() -> None:
    """Two models tie it, as one model would."""
    first, second = Net(), nn.Linear(3, 5)
    second.weight = first.emb.weight
    moved(first)
    with pytest.raises(ValueError, match="'weight' is the weight of an embedding that another"):
        fleet.distributed_model(second)
