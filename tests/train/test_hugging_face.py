"""A causal LM of transformers with LoRA by peft, made on the spot: it trains, resumes, merges and is told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import rank_of
from rank_world import KEYS, RankWorld, topology

from trainer_sidecar.contract.plan import CheckpointPolicy, FingerprintPolicy, Plan, WhenBusy
from trainer_sidecar.store.verify import read_manifest
from trainer_sidecar.train import Session, fingerprint, fingerprint_policy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WORDS = [f"w{i}" for i in range(60)]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
EACH = CheckpointPolicy(interval_steps=1, interval_seconds=0, when_busy=WhenBusy.WAIT)
END = 6


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("hf") / "run")
    yield made
    made.close()


def tokenizer(words: list[str] = WORDS, template: str = TEMPLATE) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(WordLevel({w: i for i, w in enumerate([*words, "<unk>"])}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    made.chat_template = template
    return made


def config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"vocab_size": 61, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaConfig(**{**sizes, **heads, **changes})


class Chats:
    """Token ids of short chats, rendered by the chat template."""

    def __init__(self) -> None:
        tokens = tokenizer()
        self.rows = []
        for i in range(24):
            said = " ".join(WORDS[(i + k * k) % len(WORDS)] for k in range(8))
            text = tokens.apply_chat_template([{"role": "user", "content": said}], tokenize=False)
            self.rows.append(torch.tensor(tokens(text)["input_ids"]))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.rows[i]


class Adapted:
    """The script: base, adapters with dropout, optimizer of what trains, scheduler of transformers."""

    def __init__(self) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaForCausalLM, get_linear_schedule_with_warmup

        torch.manual_seed(0)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
        self.model = get_peft_model(LlamaForCausalLM(config()), lora)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=0.01)
        self.scheduler = get_linear_schedule_with_warmup(self.optimizer, 2, 20)

    def run(self, each: Callable[[int], None] = lambda step: None) -> dict[int, float]:
        tokens, losses = tokenizer(), {}
        known = fingerprint(model_config=config(), tokenizer=tokens, chat_template=tokens)
        options: dict[str, Any] = {"optimizer": self.optimizer, "scheduler": self.scheduler, "seed": 1}
        with Session.from_env(
            model=self.model, data=Chats(), total_steps=END, fingerprints=known, device="cpu", **options
        ) as session:
            self.model.train()
            for ids in session.batches():
                loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                each(session.step + 1)
                session.step_end(loss)
                losses[session.step] = loss.item()
        return losses

    def merge(self, step: int) -> None:
        """ReLoRA at step 3: peft merges through `.data`, and the adapters begin anew."""
        from peft.tuners.lora import LoraLayer

        if step != 3:
            return
        self.model.merge_adapter()
        for module in self.model.modules():
            if isinstance(module, LoraLayer):
                module.merged_adapters.clear()
                module.reset_lora_parameters("default", True)


def attempt(world: RankWorld, after: tuple[Plan, int] | None = None) -> Plan:
    restore = None
    if after is not None:
        entry = next(c for c in world.commits() if (c.epoch, c.step) == (after[0].epoch, after[1]))
        restore = world.journal.refresh().restore_point_of(entry.checkpoint_id)
    return world.attempt(topology(1, 4, micro=4), restore, checkpoint=EACH)


def frozen(world: RankWorld, plan: Plan, step: int) -> list[str]:
    entry = next(c for c in world.commits() if (c.epoch, c.step) == (plan.epoch, step))
    point = world.journal.refresh().restore_point_of(entry.checkpoint_id)
    return [f.sha256 for f in read_manifest(world.store, KEYS, point).frozen]


def same_weights(a: Adapted, b: Adapted) -> bool:
    pairs = zip(a.model.state_dict().items(), b.model.state_dict().items(), strict=True)
    return all(m == n and torch.equal(x, y) for (m, x), (n, y) in pairs)


@pytest.mark.parametrize("merges", [False, True], ids=["lora", "merged"])
def test_lora_goes_on_bit_for_bit_and_its_base_is_kept_once_for_each_merge(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, merges: bool
) -> None:
    control, first = Adapted(), attempt(world)
    with rank_of(world, first, monkeypatch):
        losses = control.run(control.merge if merges else lambda step: None)
    assert frozen(world, first, 2)
    assert (frozen(world, first, 2) == frozen(world, first, 3)) is not merges
    assert frozen(world, first, 3) == frozen(world, first, 6)
    for start in (2, 3, 4):
        resumed, plan = Adapted(), attempt(world, (first, start))
        with rank_of(world, plan, monkeypatch):
            found = resumed.run(resumed.merge if merges else lambda step: None)
        assert found == {step: losses[step] for step in range(start + 1, END + 1)}
        assert same_weights(resumed, control)
        assert frozen(world, plan, END) == frozen(world, first, END)


def told(saved: dict[str, str], now: dict[str, str]) -> dict[str, bool]:
    """Changed names, and whether each stops a resume."""
    found = fingerprint_policy.differences(saved, now, FingerprintPolicy(), ())
    return {d.name: d.stops for d in found}


def test_a_config_is_known_by_its_fields_wherever_it_was_read_from(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config().save_pretrained(tmp_path)
    saved, again = (
        fingerprint(model_config=config()),
        fingerprint(model_config=AutoConfig.from_pretrained(tmp_path)),
    )
    assert told(saved, again) == {}
    assert saved["model.vocab_size"] == "61"
    assert told(saved, fingerprint(model_config=config(vocab_size=64)))["model.vocab_size"] is True
    assert (
        told(saved, fingerprint(model_config=config(num_hidden_layers=3)))["model.num_hidden_layers"] is True
    )


def test_a_tokenizer_is_known_by_object_and_by_files_and_so_is_its_template(tmp_path: Path) -> None:
    folders = []
    for name, made in (("one", tokenizer()), ("two", tokenizer()), ("other", tokenizer(WORDS[::-1]))):
        made.save_pretrained(tmp_path / name)
        folders.append(fingerprint(tokenizer=tmp_path / name))
    assert told(folders[0], folders[1]) == {}
    assert told(folders[0], folders[2])["tokenizer.tokenizer.json"] is True
    one, same, other = (fingerprint(tokenizer=t) for t in (tokenizer(), tokenizer(), tokenizer(WORDS[::-1])))
    assert told(one, same) == {}
    assert told(one, other)["tokenizer.vocabulary"] is True
    before, after = (
        fingerprint(chat_template=tokenizer(template=t)) for t in (TEMPLATE, TEMPLATE + "assistant:")
    )
    assert told(before, before) == {}
    assert told(before, after)["chatTemplate.text"] is True
    accepted = fingerprint_policy.differences(before, after, FingerprintPolicy(), ("chatTemplate*",))
    assert not any(d.stops for d in accepted)
