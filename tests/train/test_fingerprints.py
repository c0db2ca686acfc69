"""What a run is made of, told by field, and what a difference means for a resume."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Parts, rank_of
from rank_world import RankWorld, topology

from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.contract.plan import FingerprintClass, FingerprintPolicy, Plan
from trainer_sidecar.train import DatasetManifest, ResumeRefused, Session, fingerprint
from trainer_sidecar.train.code_version import code_version, git_version
from trainer_sidecar.train.fingerprint_policy import differences

pytestmark = pytest.mark.timeout(120)


@dataclass
class Config:
    width: int = 8
    betas: tuple[float, float] = (0.9, 0.95)
    rope: dict[str, Any] = field(default_factory=lambda: {"theta": 1e4, "scaling": None})


class HuggingFaceLike:
    """Known only by its methods, as `PretrainedConfig` is."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def to_dict(self) -> dict[str, Any]:
        base = {
            "hidden_size": 64,
            "architectures": ["Tiny"],
            "dtype": torch.bfloat16,
            "_name_or_path": "somewhere",
        }
        return {**base, "transformers_version": "9.9", **self.changes}


class Tokenizer:
    chat_template = "{{ messages }}"

    def __init__(self, words: list[str]) -> None:
        self.special_tokens_map = {"eos_token": "</s>"}
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}


def stops(saved: dict[str, str], now: dict[str, str], **options: Any) -> dict[str, str]:
    return {d.name: d.kind.value for d in differences(saved, now, **options) if d.stops}


def test_a_config_is_told_by_field_whatever_class_it_has() -> None:
    expected = {"model.width": "8", "model.betas": "[0.9, 0.95]", "model.rope.theta": "10000.0"}
    as_dict = {"width": 8, "betas": (0.9, 0.95), "rope": {"theta": 1e4, "scaling": None}}
    for config in (Config(), as_dict, argparse.Namespace(**as_dict)):
        found = fingerprint(model_config=config)
        assert found.items() >= expected.items()
        assert found["model.rope.scaling"] == "null"
    assert fingerprint(model_config=Config())["model"] == fingerprint(model_config=as_dict)["model"]


def test_where_a_hugging_face_config_came_from_does_not_count() -> None:
    found = fingerprint(model_config=HuggingFaceLike())
    assert found == fingerprint(
        model_config=HuggingFaceLike(_name_or_path="elsewhere", transformers_version="10")
    )
    assert (found["model.dtype"], found["model.architectures"]) == ("torch.bfloat16", "[Tiny]")


def test_long_values_are_kept_by_digest_and_objects_by_class() -> None:
    found = fingerprint(training_config={"prompt": "x" * 1000, "callback": object()})
    assert found["training.prompt"].startswith("sha256:")
    assert found["training.callback"] == "<object>"
    with pytest.raises(ValueError, match="model_config is a int"):
        fingerprint(model_config=3)


def test_tokenizers_are_known_by_files_or_by_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "spiece.model").write_bytes(b"\0\1")
    (tmp_path / "model.safetensors").write_bytes(b"not a tokenizer's")
    by_files = fingerprint(tokenizer=tmp_path)
    assert {n for n in by_files if "." in n} == {"tokenizer.tokenizer.json", "tokenizer.spiece.model"}
    (tmp_path / "tokenizer.json").write_text("{ }")
    assert stops(by_files, fingerprint(tokenizer=tmp_path)) == {"tokenizer.tokenizer.json": "refused"}
    small, large = fingerprint(tokenizer=Tokenizer(["a"])), fingerprint(tokenizer=Tokenizer(["a", "b"]))
    assert stops(small, large) == {"tokenizer.size": "refused", "tokenizer.vocabulary": "refused"}
    with pytest.raises(ValueError, match="no tokenizer file in"):
        fingerprint(tokenizer=tmp_path / "nowhere")


def test_a_chat_template_needs_consent() -> None:
    old, new = fingerprint(chat_template=Tokenizer([])), fingerprint(chat_template="{{ other }}")
    assert stops(old, new) == {"chatTemplate.text": "needs consent"}
    assert stops(old, new, accept=["chatTemplate.*"]) == {}


def test_datasets_are_known_by_length_and_content_without_reading_them_at_once(tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(name.encode() * 3)
    folder = fingerprint(dataset=tmp_path)
    assert folder["datasetManifest.files"] == "2"
    (tmp_path / "b.bin").write_bytes(b"changed")
    assert set(stops(folder, fingerprint(dataset=tmp_path))) == {
        "datasetManifest.content",
        "datasetManifest.file.b.bin",
    }

    records = [b"one", b"two", b""]
    manifest = DatasetManifest()
    for record in records:
        manifest.add(record)
    assert fingerprint(dataset=manifest) == fingerprint(dataset=iter(records))
    assert fingerprint(dataset=iter([b"onetwo", b"", b""])) != fingerprint(dataset=iter(records))

    samples = [{"x": torch.full((2,), float(i)), "y": i} for i in range(100)]
    assert fingerprint(dataset=samples)["datasetManifest.length"] == "100"
    changed = [{**sample, "y": -1} for sample in samples]
    assert set(stops(fingerprint(dataset=samples), fingerprint(dataset=changed))) == {
        "datasetManifest.content of 64 samples"
    }


def test_the_default_policy_by_example() -> None:
    def kinds(a: dict[str, str], b: dict[str, str]) -> dict[str, str]:
        return {d.name: d.kind.value for d in differences(a, b)}

    saved = fingerprint(
        training_config={"lr": 1e-3, "output_dir": "/a"}, model_config={"layers": 2}, more={"mine": "1"}
    )
    now = fingerprint(
        training_config={"lr": 2e-3, "output_dir": "/b"}, model_config={"layers": 3}, more={"mine": "2"}
    )
    saved |= {"code.commit": "a", "package.torch": "2.14"}
    now |= {"code.commit": "b", "package.torch": "2.15"}
    assert kinds(saved, now) == {
        "mine": "refused",
        "model.layers": "refused",
        "training.lr": "needs consent",
        "training.output_dir": "harmless",
        "code.commit": "harmless",
        "package.torch": "harmless",
    }


def test_what_was_never_recorded_cannot_differ_and_a_new_field_is_asked_about() -> None:
    now = fingerprint(model_config={"layers": 2, "bias": True})
    assert stops({}, now) == {}
    assert stops(fingerprint(model_config={"layers": 2}), now) == {"model.bias": "needs consent"}
    assert stops(now, {}) == dict.fromkeys(now, "needs consent")
    assert stops({"mine": "1"}, {}) == {"mine": "refused"}


def test_a_field_that_one_side_lacks_and_the_other_leaves_as_it_comes_is_harmless() -> None:
    old = {"lr": 1, "gone": None, "was": False, "fsdp": {"gone": None}}
    saved = fingerprint(training_config=old, model_config={"layers": 2, "gone": None})
    defaults = fingerprint(training_config={"lr": 5, "new": False, "other": "no"})
    now = fingerprint(training_config={"lr": 1, "new": False, "other": "yes"}, model_config={"layers": 2})
    found = {d.name: d.kind.value for d in differences(saved, now, defaults=defaults)}
    assert found == {
        "training.new": "harmless",
        "training.gone": "harmless",
        "training.other": "needs consent",
        "training.was": "needs consent",  # its default is known to nobody any more
        "training.fsdp.gone": "needs consent",
        "model.gone": "needs consent",
    }
    saved["training.new"] = "true"
    assert stops(saved, now, defaults=defaults)["training.new"] == "needs consent"
    forbids = FingerprintPolicy(classes={"training.gone": FingerprintClass.REFUSED})
    assert stops(saved, now, policy=forbids, defaults=defaults)["training.gone"] == "refused"


def test_a_policy_can_forbid_and_allow() -> None:
    saved, now = {"code.commit": "a", "model": "x"}, {"code.commit": "b", "model": "y"}
    strict = FingerprintPolicy(
        classes={"code.*": FingerprintClass.REFUSED, "model": FingerprintClass.CONSENT}
    )
    assert stops(saved, now, policy=strict) == {"code.commit": "refused", "model": "needs consent"}
    given = strict.model_copy(update={"accept": ["model"]})
    assert stops(saved, now, policy=given) == {"code.commit": "refused"}


def test_own_names_may_not_hide_those_of_the_library() -> None:
    with pytest.raises(ValueError, match=r"\['model'\] are names of the library's"):
        fingerprint(model_config={"a": 1}, more={"model": "mine"})


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def test_the_code_version_tells_commit_and_uncommitted_changes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    clean = code_version({}, script)
    assert clean["code.dirty"] == "clean"
    assert len(clean["code.commit"]) == 40
    script.write_text("print(2)\n")
    changed = git_version(tmp_path)
    (tmp_path / "more.py").write_text("x = 1\n")
    assert changed["code.commit"] == clean["code.commit"]
    assert len({clean["code.dirty"], changed["code.dirty"], git_version(tmp_path)["code.dirty"]}) == 3
    assert code_version({}, script)["code.script"] != clean["code.script"]
    assert torch.__version__.startswith(clean["package.torch"])
    assert code_version({"RTJ_CODE_VERSION": "built-from"}, script)["code.commit"] == "built-from"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("fingerprints") / "run")
    yield made
    made.close()


def test_a_resume_refuses_asks_or_goes_on_and_tells_each_field(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(lr: float, layers: int = 2) -> dict[str, str]:
        return fingerprint(model_config={"layers": layers}, training_config={"lr": lr}, more={"mine": "1"})

    plan = world.attempt(topology(1, 4))
    with rank_of(world, plan, monkeypatch, {"RTJ_CODE_VERSION": "commit-a"}):
        parts = Parts()
        with parts.session(total_steps=2, fingerprints=given(0.1)) as session:
            parts.train(session)
    point = world.commit_of(2)
    plan = world.attempt(topology(1, 4), point)
    with rank_of(world, plan, monkeypatch, {"RTJ_CODE_VERSION": "commit-b"}):
        with pytest.raises(ResumeRefused) as refused:
            Parts().session(fingerprints=given(0.2, layers=3))
        assert (
            "fingerprint model.layers: 2 in the checkpoint, 3 in this run (refused)"
            in refused.value.differences
        )
        assert any(
            "training.lr: 0.1 in the checkpoint, 0.2 in this run (needs consent" in d
            for d in refused.value.differences
        )
        assert not any("code.commit" in d for d in refused.value.differences)
        parts = Parts()
        with parts.session(total_steps=3, fingerprints=given(0.2), accept=["training.*"]) as session:
            told = {
                c.name: (c.expected, c.found, c.detail) for c in _report(session) if "fingerprint" in c.name
            }
            parts.train(session)
    assert told["fingerprint training.lr"] == ("0.1", "0.2", "needs consent, given")
    assert told["fingerprint code.commit"] == ("commit-a", "commit-b", "harmless")
    assert "fingerprint training" not in told


def test_a_plan_accepts_and_refuses_by_field_and_declares_what_the_platform_knows(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `fingerprintRules` and `fingerprints` of a job say it."""

    def under(policy: FingerprintPolicy, point: RestorePoint | None = None) -> Plan:
        plan = world.attempt(topology(1, 4), point).model_copy(update={"fingerprints": policy})
        world.volume.plan(plan.epoch).write_bytes(plan.to_bytes())
        return plan

    def given(lr: float) -> dict[str, str]:
        return fingerprint(training_config={"lr": lr, "betas": 0.9}, tokenizer=Tokenizer(["a"]))

    declared = FingerprintPolicy(declared={"datasetManifest": "sha256:one"})
    with rank_of(world, under(declared), monkeypatch):
        parts = Parts()
        with parts.session(total_steps=2, fingerprints=given(0.1)) as session:
            parts.train(session)
    point = world.commit_of(2)
    for policy, said in (
        (
            FingerprintPolicy(declared={"datasetManifest": "sha256:two"}),
            "sha256:one in the checkpoint, sha256:two",
        ),
        (
            FingerprintPolicy(declared={"tokenizer": "sha256:other"}),
            "tokenizer: sha256:other in the job's spec",
        ),
        (FingerprintPolicy(classes={"training.lr": FingerprintClass.REFUSED}), "0.2 in this run (refused)"),
        (
            FingerprintPolicy(classes={"datasetManifest": FingerprintClass.REFUSED}),
            "absent in this run (refused)",
        ),
        (declared, "needs consent"),
    ):
        with (
            rank_of(world, under(policy, point), monkeypatch),
            pytest.raises(ResumeRefused, match=re.escape(said)),
        ):
            Parts().session(fingerprints=given(0.2), accept=["training.beta*"])
    accepts = declared.model_copy(update={"accept": ["training.*"]})
    with rank_of(world, under(accepts, point), monkeypatch):
        parts = Parts()
        with parts.session(total_steps=3, fingerprints=given(0.2)) as session:
            told = {c.name: c.detail for c in _report(session)}
            parts.train(session)
    assert told["fingerprint training.lr"] == "needs consent, given"


def _report(session: Session) -> list[Any]:
    assert session.resume is not None
    return session.resume.checks
