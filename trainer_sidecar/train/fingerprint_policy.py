"""What a changed fingerprint means: harmless (shown), needs consent (named in `accept`), or refused.

Rules are patterns over names, the first that matches decides; a plan's own rules come before the default ones. Names
that no rule knows are the user's own and must be equal in every attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from trainer_sidecar.contract.plan import FingerprintClass, FingerprintPolicy
from trainer_sidecar.contract.report import Check

_HARMLESS, _CONSENT, _REFUSED = FingerprintClass.HARMLESS, FingerprintClass.CONSENT, FingerprintClass.REFUSED
_ABSENT = "absent"
DEFAULT_RULES: tuple[tuple[str, FingerprintClass], ...] = (
    ("code.*", _HARMLESS),
    ("package.*", _HARMLESS),
    # Where things are written, shown and counted changes no number of the training.
    *(
        (f"training.{name}", _HARMLESS)
        for name in ("output_dir", "logging*", "log_*", "run_name", "report_to")
    ),
    *(
        (f"training.{name}", _HARMLESS)
        for name in ("save_*", "eval_*", "*num_workers", "*prefetch*", "push_to_hub*")
    ),
    *(
        (f"training.{name}", _HARMLESS)
        for name in ("hub_*", "disable_tqdm", "resume*", "*total_limit", "local_rank")
    ),
    ("training.peft.*.peft_version", _HARMLESS),  # of earlier checkpoints
    ("training", _CONSENT),
    ("training.*", _CONSENT),
    ("model.use_cache", _HARMLESS),
    ("model.*attn_implementation*", _CONSENT),
    ("model.*dropout*", _CONSENT),
    ("model.*pdrop*", _CONSENT),
    ("model", _REFUSED),
    ("model.*", _REFUSED),
    ("chatTemplate", _CONSENT),
    ("chatTemplate.*", _CONSENT),
    ("tokenizer.chat_template*", _CONSENT),
    ("tokenizer", _REFUSED),
    ("tokenizer.*", _REFUSED),
    ("datasetManifest", _REFUSED),
    ("datasetManifest.*", _REFUSED),
)


@dataclass(frozen=True)
class Difference:
    """One fingerprint with its value in the checkpoint and in this run, and what that means here."""

    name: str
    saved: str
    now: str
    kind: FingerprintClass
    accepted: bool = False

    @property
    def stops(self) -> bool:
        return self.kind is _REFUSED or (self.kind is _CONSENT and not self.accepted)

    def __str__(self) -> str:
        said = f"fingerprint {self.name}: {self.saved} in the checkpoint, {self.now} in this run ({self.kind}"
        if self.accepted:
            return f"{said}, given)"
        ways = "fingerprintRules of the job, --accept of rtj run, or accept= of the session"
        hint = f": {ways} may give it" if self.kind is _CONSENT else ""
        return f"{said}{hint})"

    def check(self) -> Check:
        """The difference as a line of the resume report."""
        detail = f"{self.kind}{', given' if self.accepted else ''}"
        return Check(
            name=f"fingerprint {self.name}",
            passed=not self.stops,
            expected=self.saved,
            found=self.now,
            detail=detail,
        )


def differences(
    saved: Mapping[str, str],
    now: Mapping[str, str],
    policy: FingerprintPolicy | None = None,
    accept: Sequence[str] = (),
    defaults: Mapping[str, str] | None = None,
) -> list[Difference]:
    """Every fingerprint that differs, those that stop a resume first. `accept` are patterns that give consent;
    `defaults`: values that fields of this run have where a script says nothing."""
    policy, defaults = policy or FingerprintPolicy(), defaults or {}
    siblings = {_group(name) for name in defaults}
    given = (*policy.accept, *accept)
    found = []
    for name in sorted(saved.keys() | now.keys()):
        old, new = saved.get(name, _ABSENT), now.get(name, _ABSENT)
        if old == new or _told_by_fields(name, saved, now):
            continue
        rule = ruled(name, policy.classes.items())
        kind = rule or ruled(name, DEFAULT_RULES) or _REFUSED
        if rule is None and (name not in saved or name not in now):
            left_alone = (
                now[name] == defaults.get(name) if name in now else old == "null" and _group(name) in siblings
            )
            kind = _HARMLESS if left_alone else _one_sided(name, kind, saved)
        accepted = kind is _CONSENT and any(fnmatchcase(name, pattern) for pattern in given)
        found.append(Difference(name, old, new, kind, accepted))
    return sorted(found, key=lambda d: not d.stops)


def declared_differences(found: Mapping[str, str], declared: Mapping[str, str]) -> list[str]:
    """Fingerprints that the script found otherwise than the job's spec declares them."""
    return [
        f"fingerprint {name}: {value} in the job's spec, {found[name]} as the script finds it: correct "
        "spec.fingerprints, or what the image reads"
        for name, value in sorted(declared.items())
        if found.get(name, value) != value
    ]


def ruled(name: str, rules: Iterable[tuple[str, FingerprintClass]]) -> FingerprintClass | None:
    """Class by the first pattern that matches, None when none does."""
    return next((kind for pattern, kind in rules if fnmatchcase(name, pattern)), None)


def _part(name: str) -> str:
    return name.partition(".")[0]


def _group(name: str) -> str:
    return name.rpartition(".")[0]


def _told_by_fields(name: str, saved: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """A part's own digest says nothing more when both sides list its fields."""
    return "." not in name and all(any(_part(n) == name and n != name for n in side) for side in (saved, now))


def _one_sided(name: str, kind: FingerprintClass, saved: Mapping[str, str]) -> FingerprintClass:
    """A field that one side lacks. Configs gain fields with new releases, so that of a known part is asked about;
    a whole part that was never recorded cannot differ."""
    known = {_part(pattern) for pattern, _ in DEFAULT_RULES}
    if _part(name) not in known or kind is _HARMLESS:
        return kind
    if not any(_part(n) == _part(name) for n in saved):
        return _HARMLESS
    return _CONSENT
