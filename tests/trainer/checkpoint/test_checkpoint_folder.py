"""A folder of checkpoints: which are there, and which go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pserver.checkpoint import checkpoint
from pserver.checkpoint.checkpoint import Saved
from pserver.storage.local import InUse
from trainer.checkpoint.checkpoint_folder import CheckpointFolder


def write(folder: CheckpointFolder, step: int, base: str = "") -> Saved:
    name = folder.name_at(step)
    saved = checkpoint.save(folder.path_of(name), {"w": torch.full((2,), step)}, {"step": step})
    folder.add(name, base)
    return saved


@pytest.fixture(params=["directory", "url"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return str(tmp_path / "job")
    return f"memory://{tmp_path}/job"


def test_the_newest_are_kept(path: str) -> None:
    """The others go, with all their files; another process finds the same."""
    folder = CheckpointFolder(path, keep=2)
    for step in (10, 20, 30):
        write(folder, step)
    again = CheckpointFolder(path, keep=1)

    for found in (folder, again):
        assert found.paths() == [folder.path_of("step-000030"), folder.path_of("step-000020")]
    with pytest.raises(FileNotFoundError):
        checkpoint.load(folder.path_of("step-000010"))
    assert checkpoint.load(folder.path_of("step-000020"))[1]["step"] == 20
    write(again, 40)
    assert again.paths() == [folder.path_of("step-000040")]


def test_a_removed_one_leaves_no_folder(tmp_path: Path) -> None:
    """Nor any file, but the list."""
    folder = CheckpointFolder(tmp_path, keep=1)
    for step in (1, 2):
        write(folder, step)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoints.json", "step-000002"]


def test_what_a_kept_one_continues_is_kept(path: str) -> None:
    """However many that are; when the last that continues it goes it goes, too."""
    folder = CheckpointFolder(path, keep=1)
    names = [folder.name_at(step) for step in range(1, 6)]
    saved = write(folder, 1)
    for step, base in ((2, names[0]), (3, names[1])):
        assert folder.continued(saved, deltas=2) == base
        saved = write(folder, step, base)
    assert folder.paths() == [folder.path_of(name) for name in reversed(names[:3])]
    assert folder.continued(saved, deltas=2) == ""  # two lead back already
    assert folder.continued(saved, deltas=3) == names[2]
    write(folder, 4)

    assert folder.paths() == [folder.path_of(names[3])]


def test_only_the_job_s_own_last_one_is_continued(path: str) -> None:
    """A save of the script's own in between has taken what had changed."""
    folder = CheckpointFolder(path, keep=2)
    assert folder.continued(None, deltas=9) == ""
    first, second = write(folder, 1), write(folder, 2)

    assert folder.continued(first, deltas=9) == ""
    assert folder.continued(Saved(f"{path}/own", "1"), deltas=9) == ""
    assert folder.continued(second, deltas=9) == "step-000002"


def test_one_step_saved_twice_is_listed_once(path: str) -> None:
    """A job that goes on from an older one comes by again."""
    folder = CheckpointFolder(path, keep=3)
    for step in (1, 2, 1):
        write(folder, step)
    assert folder.paths() == [folder.path_of("step-000001"), folder.path_of("step-000002")]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"format": 2, "checkpoints": []}',
        '{"format": 1, "checkpoints": [{"name": "a"}]}',
        '{"format": 1, "checkpoints": [{"name": "a", "base": "b"}]}',
    ],
)
def test_a_damaged_list_is_named(tmp_path: Path, content: str) -> None:
    """Rather than to begin anew."""
    (tmp_path / "checkpoints.json").write_text(content)
    with pytest.raises(ValueError, match=r"checkpoints\.json: expected a list of checkpoints"):
        CheckpointFolder(tmp_path, keep=1)


def test_fewer_than_one_cannot_be_kept(tmp_path: Path) -> None:
    """A folder of none is no folder."""
    with pytest.raises(ValueError, match="expected 1 or more, got 0"):
        CheckpointFolder(tmp_path, keep=0)


def test_what_a_stopped_save_has_left_goes(tmp_path: Path) -> None:
    """But nothing that is complete, and nothing of another name."""
    folder = CheckpointFolder(tmp_path, keep=1)
    write(folder, 1)
    checkpoint.save(folder.path_of("step-000002"), {}, {})  # the list lacks it
    for name in ("step-000003/writing-1", "mine"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "rows-1.safetensors").write_text("")
    held = folder.hold()

    assert held is not None
    found = sorted(each.name for each in tmp_path.glob("[!.]*"))
    assert found == ["checkpoints.json", "mine", "step-000001", "step-000002"]
    held.release()


def test_another_job_keeps_out(tmp_path: Path) -> None:
    """It would go on from the first one's checkpoints, and remove them."""
    held = CheckpointFolder(tmp_path, keep=1).hold()
    with pytest.raises(InUse, match="give each job a path of its own"):
        CheckpointFolder(tmp_path, keep=1).hold()
    assert held is not None
    held.release()
    assert CheckpointFolder("memory://x", keep=1).hold() is None
