"""A model that was trained here loads in plain transformers and in plain torch.distributed.checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from in_process import Parts, rank_of
from rank_world import KEYS, RankWorld, topology
from torch import nn

from trainer_sidecar import cli
from trainer_sidecar.contract.plan import CheckpointPolicy, WhenBusy

pytestmark = pytest.mark.timeout(240)
EACH = CheckpointPolicy(interval_steps=1, interval_seconds=0, when_busy=WhenBusy.WAIT)
Export = Callable[..., str]


class Language(nn.Module):
    """A tiny causal language model behind the shape of the other tests' data: numbers in, numbers out."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.config = LlamaConfig(
            vocab_size=100, max_position_embeddings=16, tie_word_embeddings=True, **sizes
        )
        self.inner = LlamaForCausalLM(self.config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x.abs() * 50).long().clamp(0, 99)
        return self.inner(input_ids=ids).logits.mean(dim=(1, 2), keepdim=False).unsqueeze(1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("export") / "run")
    yield made
    made.close()


@pytest.fixture(scope="module")
def trained(world: RankWorld) -> Language:
    """After two steps; both are committed."""
    torch.manual_seed(0)
    language = Language()
    parts = Parts(language.inner)
    parts.model = language  # the forward of the test's shape; the session saves what transformers made
    plan = world.attempt(topology(1, 4, micro=4), checkpoint=EACH)
    with (
        pytest.MonkeyPatch.context() as patch,
        rank_of(world, plan, patch),
        parts.session(total_steps=2) as session,
    ):
        parts.train(session)
    return language


@pytest.fixture
def export(world: RankWorld, trained: Language, capsys: pytest.CaptureFixture[str]) -> Export:
    def call(*words: str, code: int = 0) -> str:
        where = ["--store", world.store.url, "--namespace", KEYS.namespace, "--run-id", KEYS.run_id]
        found = cli.main(["export", *words, *where])
        out, said = capsys.readouterr()
        assert found == code, (out, said)
        return out + said

    return call


def test_transformers_loads_the_folder_and_finds_every_weight_as_it_was(
    export: Export, trained: Language, tmp_path: Path
) -> None:
    from transformers import LlamaForCausalLM

    config, to = tmp_path / "base", tmp_path / "out"
    trained.config.save_pretrained(config)
    (config / "model.safetensors").write_bytes(b"the old weights stay behind")
    export("--format", "hf", "--config", str(config), "--to", str(to), "--strip", "inner.", "--shard-mb", "1")
    loaded = LlamaForCausalLM.from_pretrained(to)
    expected = trained.inner.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    told = json.loads((to / "rtj-export.json").read_text())
    assert (told["step"], told["samples"]) == (2, 8)
    assert "gets no config.json" in export("--format", "hf", "--to", str(tmp_path / "bare"))


def test_plain_dcp_loads_the_folder_with_the_optimizer(
    export: Export, trained: Language, tmp_path: Path
) -> None:
    to = tmp_path / "out"
    export("--format", "dcp", "--all", "--to", str(to))
    weight = "inner.model.layers.0.mlp.up_proj.weight"
    moment = torch.empty_like(trained.get_parameter(weight))
    state = {f"model/{weight}": moment.clone(), f"optimizer/0/{weight}/exp_avg": moment.clone()}
    dcp.load(state, checkpoint_id=str(to), no_dist=True)
    assert torch.equal(state[f"model/{weight}"], trained.get_parameter(weight))
    assert state[f"optimizer/0/{weight}/exp_avg"].abs().sum() > 0
    assert sorted(p.name for p in to.iterdir()) == [".metadata", "__0_0.distcp", "rtj-export.json"]


def test_an_older_checkpoint_by_its_id_and_what_cannot_be_is_said(
    export: Export, world: RankWorld, tmp_path: Path
) -> None:
    first = world.commits()[0]
    some = ("--trainable", "--exclude", "*.layers.1.*")
    export(first.checkpoint_id, "--to", str(tmp_path / "first"), *some)
    with safe_open(tmp_path / "first" / "tensors.safetensors", framework="pt") as file:
        assert file.metadata()["step"] == "1"
        assert "inner.model.embed_tokens.weight" in file.keys()  # noqa: SIM118 (it is no mapping)
        assert not [name for name in file.keys() if ".layers.1." in name]  # noqa: SIM118
    assert "is not empty" in export("--to", str(tmp_path / "first"), code=2)
    assert "no folder" in export("--to", str(tmp_path / "x"), "--config", str(tmp_path / "none"), code=2)
    assert not (tmp_path / "x").exists()


def test_a_byte_that_is_not_as_it_was_written_ends_the_export_and_leaves_no_whole_folder(
    export: Export, world: RankWorld, tmp_path: Path
) -> None:
    newest = world.commits()[-1]
    path = Path(world.store.url.removeprefix("file://")) / KEYS.shard(newest.checkpoint_id, 0)
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    said = export(newest.checkpoint_id, "--to", str(tmp_path / "out"), code=1)
    assert "rank-00000.distcp should be bytes 0 to 32768" in said
    assert "nothing is exported" in said
    assert not (tmp_path / "out" / "rtj-export.json").exists()
    assert not list((tmp_path / "out").glob("*.safetensors"))

    path.write_bytes(data[:-1])  # a copy that broke off, then one that was never made
    said = export(newest.checkpoint_id, "--to", str(tmp_path / "short"), "--parallel", "1", code=1)
    assert "rank-00000.distcp should be bytes" in said
    path.write_bytes(data[:1000])
    said = export(newest.checkpoint_id, "--to", str(tmp_path / "shorter"), code=1)
    assert "found a shorter object" in said
    assert "nothing is exported" in said
    path.unlink()
    said = export(newest.checkpoint_id, "--to", str(tmp_path / "missing"), "--format", "dcp", code=1)
    assert "rank-00000.distcp should be bytes 0 to" in said
    assert "found nothing; nothing is exported" in said
    assert not (tmp_path / "missing" / "rtj-export.json").exists()
