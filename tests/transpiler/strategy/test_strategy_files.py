"""Files of a strategy: a load replaces everything, and a bad file changes nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.settings import assign, other, read
from transpiler import DistributedStrategy
from transpiler import strategy_pb2 as pb
from transpiler.strategy.strategy import CONFIGS, KEPT, every_setting, kept_fields


def test_a_load_replaces_everything(tmp_path: Path) -> None:
    """What the file does not name returns to its default; a file of an untouched strategy is
    empty.
    """
    DistributedStrategy().save_to_prototxt(str(tmp_path / "s"))
    strategy = DistributedStrategy()
    strategy.amp = True
    strategy.load_from_prototxt(str(tmp_path / "s"))

    assert strategy == DistributedStrategy()
    assert (tmp_path / "s").read_text() == ""


BAD_FILES = [
    (b"amp: true\nampp: true\n", "line 2: .*ampp"),
    (b"amp: true\na_sync_configs {\n  k_step: 3\n}\n", "line 3"),
    (b"amp: maybe\n", "line 1"),
    (b"a_sync_configs { k_steps: 3", "expected a strategy"),
    (
        b"a_sync_configs { k_steps: -3 }",
        r"a_sync_configs\['k_steps'\]: expected a whole number of 0 or more, got -3",
    ),
    (b"a_sync_configs { outer_optimizer { lr: -1 } }", "lr"),
    (b"a_sync_configs { modes { pattern: '*' mode: 'x' } }", "sync"),
    (
        b"a_sync_configs {"
        b" modes { pattern: 'x*' mode: 'geo' } modes { pattern: 'x*' mode: 'sync' } }",
        r"a_sync_configs\['modes'\]: expected each pattern once, got 'x\*' twice",
    ),
    (b"\xff\xfe", "not UTF-8"),
]


@pytest.mark.parametrize(("content", "message"), BAD_FILES)
def test_a_bad_file_is_refused_and_changes_nothing(
    content: bytes, message: str, tmp_path: Path
) -> None:
    """An unknown field, a wrong type, a value out of range or garbage raises ValueError naming the
    file (and line).
    """
    path = tmp_path / "bad.prototxt"
    path.write_bytes(content)
    strategy = DistributedStrategy()
    strategy.lamb = True

    with pytest.raises(ValueError, match=f"bad.prototxt.*{message}"):
        strategy.load_from_prototxt(path)

    assert strategy.unsupported(()) == ["lamb"]


@pytest.mark.parametrize(
    ("path", "error", "said"),
    [
        (None, TypeError, "expected a path as text, got None"),
        (b"file", TypeError, "expected a path as text, got b'file'"),
        ("a\0b", ValueError, r"without a zero byte, got 'a\\x00b'"),
        ("", ValueError, "expected a path"),
    ],
)
def test_what_is_no_path_is_refused(path: Any, error: type[Exception], said: str) -> None:
    """Both ways, by the name of the call."""
    for name in ("save_to_prototxt", "load_from_prototxt"):
        with pytest.raises(error, match=f"{name}: .*{said}"):
            getattr(DistributedStrategy(), name)(path)


def test_the_originals_words_are_taken_for_todays(tmp_path: Path) -> None:
    """-1 where there are no k_steps, and the former name of accumulate_steps."""
    path = tmp_path / "original.prototxt"
    path.write_text(
        "a_sync: true\na_sync_configs { k_steps: -1 launch_barrier: false }\n"
        "pipeline_configs { micro_batch: 3 }\n"
    )
    strategy = DistributedStrategy()
    strategy.load_from_prototxt(path)
    assert strategy.a_sync_configs["k_steps"] == 0
    assert strategy.a_sync_configs["launch_barrier"] is False
    assert strategy.pipeline_configs["accumulate_steps"] == 3


def test_a_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    """A file that is not there is said to be so, with its name."""
    with pytest.raises(FileNotFoundError, match="absent"):
        DistributedStrategy().load_from_prototxt(tmp_path / "absent")


def test_every_property_at_once_survives_a_file(tmp_path: Path) -> None:
    """Each differs from its default, and reads back as it was."""
    strategy, settings = DistributedStrategy(), dict(every_setting())
    for name, setting in settings.items():
        owner, _, key = name.rpartition(".")
        if owner:
            setattr(strategy, owner, {**getattr(strategy, owner), key: other(name, setting)})
        else:
            assign(strategy, name, other(name, setting))
    strategy.save_to_prototxt(tmp_path / "s")
    loaded = DistributedStrategy()
    loaded.load_from_prototxt(tmp_path / "s")

    assert strategy.unsupported(()) == list(settings)
    assert loaded == strategy
    assert all(read(loaded, name) == read(strategy, name) for name in settings)


ORIGINAL = """mode: PS
amp: true
sync_nccl_allreduce: false
fuse_grad_size_in_TFLOPS: 20.0
amp_configs {
  decr_ratio: 0.5
  use_optimizer_fp16: true
}
a_sync_configs {
  lr_decay_steps: 5
  use_ps_gpu: 1
}
sharding_configs {
  stage: 2
}
hybrid_configs {
  mp_degree: 2
  mp_configs {
    sync_mode: "broadcast"
  }
}
downpour_table_param {
  table_name: "emb"
  accessor {
    ctr_accessor_param {
      nonclk_coeff: 0.25
    }
  }
}
build_strategy {
  debug_graphviz_path: "graph"
}
"""
KEEPS = [
    "mode",
    "fuse_grad_size_in_TFLOPS",
    "downpour_table_param",
    "a_sync_configs.lr_decay_steps",
    "a_sync_configs.use_ps_gpu",
    "amp_configs.use_optimizer_fp16",
    "sharding_configs.stage",
    "hybrid_configs.mp_configs",
    "build_strategy.debug_graphviz_path",
]


def test_a_file_of_the_original_loads_and_is_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fields that no page names are kept, in one warning that has all their names; the others act
    as assigned ones do.
    """
    path, again = tmp_path / "original", tmp_path / "again"
    path.write_text(ORIGINAL)
    strategy, second = DistributedStrategy(), DistributedStrategy()
    strategy.load_from_prototxt(path)
    (warning,) = caplog.records
    strategy.save_to_prototxt(again)
    second.load_from_prototxt(again)

    assert warning.levelno == logging.WARNING
    assert all(name in warning.getMessage() for name in KEEPS)
    assert strategy.unsupported(()) == ["amp", "hybrid_configs.mp_degree"]
    assert strategy == second and "stage: 2" in again.read_text()
    assert 'sync_mode: "broadcast"' in again.read_text() and "nonclk_coeff" in again.read_text()
    assert "sharding_configs.stage" in str(strategy) and strategy != DistributedStrategy()


def test_what_is_only_kept_is_no_setting() -> None:
    """No field has the name of a switch or key, and none can be assigned."""
    message = pb.DistributedStrategy()
    message.sharding_configs.stage = 3
    message.mode = pb.PS

    assert sorted(kept_fields(message)) == ["mode", "sharding_configs.stage"]
    for owner, settings in CONFIGS.items():
        fields = getattr(message, owner).DESCRIPTOR.fields
        assert not {each.name for each in fields if each.number >= KEPT} & set(settings)
    with pytest.raises(ValueError, match="stage"):
        DistributedStrategy().sharding_configs = {"stage": 2}


def test_an_unknown_field_is_named_beside_a_password(tmp_path: Path) -> None:
    """The error names it, and its line, and nothing of the password."""
    path = tmp_path / "s"
    path.write_text("fs_client_param {\n  passwd: 'se}same'\n}\nampp: true\n")

    with pytest.raises(ValueError, match='line 4.*"ampp"') as raised:
        DistributedStrategy().load_from_prototxt(path)
    assert "same" not in str(raised.value) and "se" + "}" not in repr(raised.value.__cause__)
