"""Programs with sparse tables, alone and on servers alike: against plain torch in the same test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.table_programs import (
    DIM,
    ROWS,
    Net,
    Servers,
    Tables,
    adagrad,
    adam,
    assert_close,
    batches,
    begun,
    run,
    sgd,
    step,
    train,
    transpiled,
    values,
)
from trainer import Executor
from transpiler import capture
from transpiler.program import Program


@pytest.mark.parametrize(
    ("kind", "make", "tolerance"),
    [(Tables, sgd, 0.0), (Tables, adagrad, 0.0), (Net, adagrad, 1e-6)],
)
def test_a_captured_program_trains_the_models_own_rows(
    kind: type[nn.Module], make: Callable[[nn.Module], torch.optim.Optimizer], tolerance: float
) -> None:
    """Alone, with a schedule: every row of every table is that of the eager script, which goes on
    from there: to the bit, but for a weight of torch's, whose sparse gradients torch adds up one by
    one.  Capturing has changed nothing.
    """
    mine, reference, data = kind(), kind(), batches(6)
    before, optimizer = values(mine), make(mine)
    proxy = next(parameter for name, parameter in mine.named_parameters() if "proxy" in name)
    proxy.grad = waiting = torch.ones(())
    main, startup = capture(mine, step, optimizer, data[0])
    assert_close(values(mine), before, 0.0)
    assert proxy.grad is waiting
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    with Executor() as exe:
        exe.run(startup)
        for batch in data:
            exe.run(main, feed=batch)
            schedule.step()
    train(mine, optimizer, data[:1])
    train(reference, other := make(reference), data, gamma=0.8)
    train(reference, other, data[:1])

    assert_close(values(mine), values(reference), tolerance)


def test_a_gradient_of_rows_is_fetched_as_a_sparse_tensor() -> None:
    """Of a table with a range of ids: the rows that the step has touched, summed where an id came
    twice.
    """
    model, _, main, startup = begun(Tables)
    ids, y = torch.tensor([[1, 2, 0], [1, 3, 0]]), torch.tensor([0, 1])
    with Executor() as exe:
        exe.run(startup)
        (gradient,) = exe.run(main, feed=(ids, y), fetch_list=["user@GRAD"])
    weight = Tables().user(torch.arange(ROWS)).detach().requires_grad_()
    item = Tables().item(ids[:, 1]).detach()
    score = (F.embedding(ids[:, 0], weight) * item).sum(1)
    F.cross_entropy(torch.stack([score, -score], 1), y).backward()

    assert gradient.is_sparse and gradient.coalesce().indices().tolist() == [[1]]
    assert torch.allclose(gradient.to_dense(), weight.grad)


def test_dense_adam_moves_every_row(servers: Servers) -> None:
    """Adam of the script's own is torch's dense one for a table as well, alone and on two
    servers.
    """
    data, found = batches(6), []
    for where in (None, servers(2)):
        model, _, main, startup = begun(Tables, adam)
        if where is None:
            with Executor() as exe:
                exe.run(startup)
                for batch in data:
                    exe.run(main, feed=batch)
            found.append(values(model))
        else:
            found.append(run(transpiled(main, startup, where), data, model)[0])
    plain = nn.ModuleDict({name: nn.Embedding(ROWS, DIM) for name in ("user", "item")})
    with torch.no_grad():
        for name, table in Tables().named_children():
            plain[name].weight.copy_(table(torch.arange(ROWS)))
    plain.forward = lambda ids: Tables.forward(_Both(plain), ids)
    train(plain, torch.optim.Adam(plain.parameters(), lr=0.05), data)

    for each in found:
        assert_close(each, {name: module.weight.detach() for name, module in plain.items()}, 1e-6)


class _Both:
    def __init__(self, modules: nn.ModuleDict) -> None:
        self.user, self.item = modules["user"], modules["item"]


def test_a_loaded_program_has_tables_of_its_own(tmp_path: Path, servers: Servers) -> None:
    """Written to a file and read without the model: rows begin as they were, and train alike, alone
    and on servers.
    """
    reference, data = Tables(), batches(6)
    model, optimizer, main, _ = begun(Tables, sgd)
    train(model, optimizer, data[:1])
    train(reference, other := sgd(reference), data[:1])
    main.save(tmp_path / "main")
    expected = []
    for batch in data[1:]:
        expected.append(float(step(reference, *batch).detach()))
        train(reference, other, [batch])
    for where in (None, servers(2)):
        program = first = Program.load(tmp_path / "main")
        if where is not None:
            transpiler = transpiled(program, None, where)
            program, first = transpiler.get_trainer_program(), transpiler.get_startup_program()
        with Executor() as exe:
            if where is not None:
                exe.run(first)
            losses = [
                float(exe.run(program, feed=batch, fetch_list=["loss"])[0]) for batch in data[1:]
            ]

        assert losses == expected


def test_an_id_out_of_range_and_a_fetched_table_are_named(servers: Servers) -> None:
    """Each is a ValueError that says which table."""
    data = batches(1)
    _, _, main, startup = begun(Net)
    with Executor() as exe:
        exe.run(startup)
        with pytest.raises(ValueError, match="table 'word.weight': ids: expected 0 to 29, got 99"):
            exe.run(main, feed=(torch.full((2, 3), 99), torch.zeros(2, dtype=torch.int64)))
        with pytest.raises(ValueError, match="'emb' is a table"):
            exe.run(main, feed=data[0], fetch_list=["emb"])
        with pytest.raises(ValueError, match="'emb@GRAD' has rows for ids of any int64"):
            exe.run(main, feed=data[0], fetch_list=["emb@GRAD"])
