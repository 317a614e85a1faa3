"""Sparse tables in programs, divided among servers: what trainers pull, what servers hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.table_jobs import ENDPOINTS, MODES, batch, captured, job, sgd, step, types
from trainer import DistributedEmbedding
from transpiler import DistributeTranspiler, DistributeTranspilerConfig, capture
from transpiler.ir.updates import tables_of
from transpiler.program import Program
from transpiler.verify.untrusted import check_server_program


def test_a_trainer_pulls_once_for_all_lookups() -> None:
    """Of all tables where ids are split at compile time, of each at run time; gradients leave in
    parts or whole; the trainer updates no row and holds none.
    """
    split, whole = job("sync"), job("run time")
    pulls = ("split_ids", "prefetch", "merge_ids")

    ids, pull, rows = ([each] * 3 for each in pulls)
    assert types(split["trainer"], *pulls) == [*ids, *pull[:1], *rows, *ids]
    assert (
        types(whole["trainer"], *pulls, "distributed_lookup_table")
        == ["distributed_lookup_table"] * 3
    )
    first = next(op for op in whole["trainer"].main.ops if op.type == "distributed_lookup_table")
    assert len(first.outputs) == 2 and first.arguments["endpoints"] == tuple(ENDPOINTS.split(","))
    for programs in (split, whole):
        assert types(programs["startup"], "fake_init", "init") == ["fake_init"] * 3
        assert not {"lookup_table", "sparse_table", "sgd", "ftrl"} & set(types(programs["trainer"]))
        assert (
            sum("table" in op.arguments for op in programs["trainer"].main.ops if op.type == "send")
            == 3
        )


@pytest.mark.parametrize("mode", ["geo", "diloco"])
def test_a_k_step_trainer_keeps_its_updates(mode: str) -> None:
    """The optimizer ops stay, and tables leave with the lane's one send of changes."""
    program = job(mode)["trainer"]
    (send,) = (op for op in program.main.ops if op.type == "send")

    assert types(program, "ftrl", "rowwise_adagrad") == ["ftrl", "rowwise_adagrad"]
    assert send.inputs[-3:] == ("emb", "own", "word.weight") and "emb.delta.server_1" in str(
        send.arguments["delta"]
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_server_has_two_blocks_for_each_table(mode: str) -> None:
    """One that updates it, complete for the mode, and one that looks rows up, which listen_and_serv
    lists.
    """
    program = job(mode)["server"]
    listen = program.main.ops[0]
    blocks = {block.index: [op.type for op in block.ops] for block in program.blocks}
    own = ["ftrl", "rowwise_adagrad"]
    update = {
        "sync": ["sum", "scale", *own],
        "geo": ["sum"],
        "delay-compensated": ["dc_compensate", *own],
        "diloco": ["sum", "scale", "momentum"],  # of all columns
    }.get(mode, own)

    prefetch = listen.arguments["prefetch_blocks"]
    assert (
        isinstance(prefetch, tuple)
        and [blocks[int(str(index))] for index in prefetch] == [["lookup_table"]] * 3
    )
    assert update in blocks.values()
    assert check_server_program(Program.from_proto(program.to_proto())) is None


class Chained(nn.Module):
    """Ids of the second lookup come from the rows of the first, or are drawn."""

    def __init__(self, drawn: bool) -> None:
        super().__init__()
        self.emb = DistributedEmbedding(4, num_embeddings=9)
        self.drawn = drawn

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.emb(ids[:, 0])
        then = torch.randint_like(ids[:, 1], 9) if self.drawn else rows.argmax(1)
        out: torch.Tensor = rows + self.emb(then) + self.emb(ids[:, 2])
        return out


@pytest.mark.parametrize("drawn", [False, True])
def test_lookups_share_a_pull_only_where_their_ids_can_be_known_before(drawn: bool) -> None:
    """Ids that depend on rows, or on random numbers drawn after, are pulled by themselves; others
    still share.
    """
    model = Chained(drawn)
    main, startup = capture(model, step, sgd(model), batch())
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, main, pservers=ENDPOINTS, trainers=1, startup_program=startup)
    merges = [
        len(op.outputs)
        for op in transpiler.get_trainer_program().main.ops
        if op.type == "merge_ids"
    ]

    assert merges == [2, 1]


def test_tables_need_servers_and_a_gradient() -> None:
    """A mode without servers, and a table that nothing trains, are refused when transpiling."""
    main, startup = captured()
    config = DistributeTranspilerConfig()
    config.mode = "nccl2"
    with pytest.raises(
        ValueError,
        match="expected a program without tables in a mode without servers, got table 'emb'",
    ):
        DistributeTranspiler(config).transpile(
            0, main, trainers=ENDPOINTS, startup_program=startup, current_endpoint="127.0.0.1:6174"
        )
    kept = tuple(op for op in main.main.ops if op.type not in ("ftrl", "rowwise_adagrad"))
    untrained = main.with_blocks(replace(main.main, ops=kept))
    assert len(tables_of(untrained.main)) == 3
    with pytest.raises(ValueError, match="table 'own': expected an op that updates its rows"):
        DistributeTranspiler().transpile(
            0, untrained, pservers=ENDPOINTS, trainers=1, startup_program=startup
        )
