"""Known vulnerabilities of the locked versions, by pip-audit, with a verdict that can be relied on.

pip-audit ends well, and says "No known vulnerabilities found", when it could ask nobody about a package: behind a
mirror without PyPI's JSON API that is each of them. Here a package that nobody answered for is no good news: the exit
code is 2.

Exit codes: 0 all were asked and nothing is known; 1 something is known; 2 no verdict on at least one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ("operator.txt", "sidecar.txt", "trainer.txt", "dev.txt")
FOUND, UNKNOWN = 1, 2


@dataclass
class Verdict:
    """On one lock. `silent`: a reason by package that nobody answered for, or by the lock when pip-audit failed."""

    asked: int = 0
    known: list[str] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)


def read(report: dict[str, Any]) -> Verdict:
    """What pip-audit's JSON says."""
    verdict = Verdict()
    for package in report["dependencies"]:
        if reason := package.get("skip_reason"):
            verdict.silent[package["name"]] = reason
            continue
        verdict.asked += 1
        for one in package["vulns"]:
            mended = ", ".join(one["fix_versions"]) or "none yet"
            verdict.known.append(
                f"{package['name']} {package['version']}: {one['id']}, mended in {mended}: "
                f"{' '.join(one.get('description', '').split())[:200]}"
            )
    return verdict


def audit(lock: Path, service: list[str]) -> Verdict:
    """Ask about every package of a lock."""
    command = [sys.executable, "-m", "pip_audit", "-r", str(lock), "--require-hashes", "--disable-pip"]
    command += ["--progress-spinner", "off", "--format", "json", "--desc", "on", *service]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return read(json.loads(done.stdout))
    except (ValueError, KeyError):
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Verdict(silent={lock.name: said[-1][:300]})


def main(argv: list[str]) -> int:
    """Print a line for each lock and each finding. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="hack/audit.py", description="Known vulnerabilities of the locks.")
    parser.add_argument(
        "locks", nargs="*", default=LOCKS, help="files of requirements/ (default: those of the images)"
    )
    parser.add_argument(
        "--osv-url", help="ask this OSV service instead of PyPI, as in https://api.osv.dev/v1/query"
    )
    options = parser.parse_args(argv)
    service = ["-s", "osv", "--osv-url", options.osv_url] if options.osv_url else ["-s", "pypi"]
    code = 0
    for name in options.locks:
        verdict = audit(ROOT / "requirements" / name, service)
        print(
            f"{name}: {verdict.asked} asked, {len(verdict.known)} known, no answer for {len(verdict.silent)}"
        )
        for line in verdict.known:
            print(f"  {line}")
        for package, reason in list(verdict.silent.items())[:3]:
            print(f"  {package}: {reason}")
        code = FOUND if verdict.known or code == FOUND else UNKNOWN if verdict.silent else code
    print(
        {
            0: "Nothing is known.",
            FOUND: "Raise what is named: its bound in pyproject.toml if need be, then `make lock UPGRADE=1`.",
            UNKNOWN: "No verdict: somebody has to be asked who answers (a network without a mirror, or --osv-url).",
        }[code]
    )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
