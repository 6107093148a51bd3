"""`router-replay inspect`: show what a file of routes or trajectories holds."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from router_replay.cli.report import check_report, say_page
from router_replay.errors import SpecError, WireError, shorten
from router_replay.number_format import number

if TYPE_CHECKING:
    from router_replay.recording.formats import Part
    from router_replay.spec import RouterSpec

SHOWN_GAPS = 5


def add(commands: Any) -> None:
    """Register the command with argparse's subparsers."""
    parser = commands.add_parser("inspect", help="show what a file of routes or trajectories holds")
    parser.add_argument("file", type=pathlib.Path, help="a file of ours, or in a format of another project")
    add_format(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--report", type=pathlib.Path, metavar="FILE", help="write a page to FILE, and its JSON beside it"
    )
    parser.set_defaults(run=_run)


def add_format(parser: argparse.ArgumentParser, model: bool = True) -> None:
    """Add the options that say what a file cannot say itself; `model` adds --model too."""
    parser.add_argument(
        "--format",
        metavar="F",
        help="the form of a file that has no mark: vllm, sglang, prime-rl, dynamo, skyrl, nemo, megatron or "
        "megatron-trace; of a file of JSON lines with token_ids, the form of their routed_experts",
    )
    if model:
        parser.add_argument(
            "--model", "--config", metavar="PATH", help="the model's folder or config.json, for forms without a spec"
        )


def _run(chosen: argparse.Namespace) -> int:
    from router_replay.recording.formats import FORMATS, open_any

    if chosen.format is not None and chosen.format not in FORMATS:
        raise WireError(f"--format must be one of {', '.join(FORMATS)}, got {chosen.format!r}")
    form, parts = open_any(chosen.file, chosen.format, spec_of(chosen.model))
    check_report(chosen.report)
    facts = Facts(chosen.file, form)
    if chosen.report is None:
        for part in parts:
            facts.add(part)
    else:
        _write_page(facts, parts, chosen.report)
    if chosen.json:
        json.dump(facts.as_json(), sys.stdout, indent=2)
        print()
    else:
        print("\n".join(facts.as_text()))
    return 0


def _write_page(facts: Facts, parts: Iterable[Part], out: pathlib.Path) -> None:
    """Count the parts, and write the page about them; each is read once."""
    import numpy as np

    from router_replay.report import Lanes, write_trajectories

    every = []
    for part in parts:
        facts.add(part)
        record = part.record
        mask = None if record is None else record.loss_mask
        versions = None if record is None else np.broadcast_to(record.versions, len(record))
        every.append(Lanes(part.place, part.routes, part.start, mask, versions).bands)
    write_trajectories(every, facts.as_text(), out, facts.expert_load)
    say_page(out)


def spec_of(model: str | None) -> RouterSpec | None:
    """Return the spec of a model's folder or config.json; None if no model is given."""
    if model is None:
        return None
    from router_replay.spec import RouterSpec

    path = pathlib.Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        return RouterSpec.from_config(json.loads(path.read_text()))
    except (ValueError, SpecError) as error:
        raise SpecError(f"--model {model}: {error}") from error


class Facts:
    """Sum up the parts of a file. `path` is the file, and `form` its form."""

    def __init__(self, path: pathlib.Path, form: str) -> None:
        self.form, self.file_bytes = form, path.stat().st_size
        self.sequences = self.rows = self.captured = self.route_bytes = 0
        self.without_routes = 0
        self.notes: list[str] = []
        self.gaps: list[tuple[str, int, int]] = []  # place, first row, row after
        self.version_rows: dict[int, int] = {}
        self.version_runs: list[tuple[int, int, int]] = []
        self.start = 0
        self.spec: RouterSpec | None = None
        self._load: Any = None
        self.tokens = self.sampled = 0
        self.rewards: list[float] = []
        self.steps: set[int] = set()

    def add(self, part: Part) -> None:
        """Count one sequence."""
        from router_replay.measure import expert_load

        self.sequences += 1
        self.notes += part.notes
        if part.record is not None:
            self.tokens += len(part.record)
            self.sampled += int(part.record.loss_mask.sum())
            self.rewards.append(part.record.reward)
            self.steps.add(part.record.step)
        routes = part.routes
        if routes is None:
            self.without_routes += 1
            return
        if self.spec is not None and routes.spec != self.spec:
            raise WireError(f"{part.place}: the routes are of another model: expected {self.spec}, got {routes.spec}")
        self.spec, self.start = routes.spec, part.start
        self.rows += len(routes)
        self.captured += int(routes.captured.sum())
        self.route_bytes += part.nbytes
        # The last token of a trajectory is never forwarded, so its row is not missing.
        known = routes[: len(routes) - 1] if part.record is not None else routes
        self.gaps += [(part.place, part.start + a, part.start + b) for a, b in known.captured_runs.spans(False)]
        self.version_runs = [(a, b, int(version)) for a, b, version in routes.version_runs or ()]
        for a, b, version in self.version_runs:
            self.version_rows[version] = self.version_rows.get(version, 0) + b - a
        load = expert_load(routes)
        self._load = load if self._load is None else self._load + load

    @property
    def bound_bytes(self) -> int:
        """The bytes that the captured rows take at the information bound."""
        return 0 if self.spec is None else -int(-self.captured * self.spec.bound_bits // 8)

    @property
    def expert_load(self) -> tuple[tuple[int, ...], Any] | None:
        """The ids of the layers and the expert load [L, E]; None if no row is captured."""
        return (self.spec.layers, self._load) if self.spec is not None and self.captured else None

    def layers(self) -> list[dict[str, Any]]:
        """Return the load of each layer: the largest over the mean, and the number of experts without a token."""
        if self.spec is None or not self.captured:
            return []
        return [
            {"layer": layer, "load": float(load.max() / load.mean()), "unused": int((load == 0).sum())}
            for layer, load in zip(self.spec.layers, self._load, strict=True)
        ]

    def as_json(self) -> dict[str, Any]:
        """Return all facts."""
        spec = self.spec
        facts: dict[str, Any] = {
            "format": self.form,
            "bytes": self.file_bytes,
            "notes": self.notes,
            "spec": spec
            and {
                "num_experts": spec.num_experts,
                "top_k": spec.top_k,
                "layers": list(spec.layers),
                "num_layers": spec.num_layers,
                "ordered": spec.ordered,
            },
            "sequences": self.sequences,
            "sequences_without_routes": self.without_routes,
            "rows": self.rows,
            "captured": self.captured,
            "gaps": [{"place": place, "from": a, "to": b} for place, a, b in self.gaps],
            "versions": {str(version): rows for version, rows in sorted(self.version_rows.items())},
            "route_bytes": self.route_bytes,
            "bound_bytes": self.bound_bytes,
            "layers": self.layers(),
        }
        if self.tokens:
            mean = sum(self.rewards) / len(self.rewards)
            facts |= {"tokens": self.tokens, "sampled": self.sampled, "reward": mean, "steps": sorted(self.steps)}
        return facts

    def as_text(self) -> list[str]:
        """Return the lines of the terminal."""
        lines = [f"{self.form}, {self.file_bytes:,} bytes", *self.notes]
        if self.tokens:
            steps = f" of {len(self.steps)} steps" if len(self.steps) > 1 else ""
            mean = sum(self.rewards) / len(self.rewards)
            lines.append(
                f"{self.sequences:,} trajectories{steps}, {self.tokens:,} tokens, {self.sampled:,} sampled, "
                f"mean reward {number(mean, 'plain')}"
            )
            if self.without_routes:
                lines.append(f"{self.without_routes:,} trajectories have no routes")
        elif self.sequences != 1:
            lines.append(f"{self.sequences:,} sequences")
        if self.spec is None:
            return [*lines, "no routes"]
        spec = self.spec
        lines.append(f"{spec.top_k} of {spec.num_experts} experts in {len(spec.layers)} layers: {spec.layers}")
        where = f"rows {self.start} to {self.start + self.rows}" if self.sequences == 1 else f"{self.rows:,} rows"
        lines.append(f"{where}, {self.captured:,} captured, {self._gaps_in_words()}")
        if self.sequences == 1:
            lines += [f"rows {self.start + a} to {self.start + b}: policy version {v}" for a, b, v in self.version_runs]
        elif self.version_rows:
            each = [f"{version} ({rows:,} rows)" for version, rows in sorted(self.version_rows.items())]
            lines.append(f"policy versions: {shorten(each)}")
        if self.captured:
            ratio = number(self.route_bytes / max(1, self.bound_bytes), "ratio")
            lines.append(
                f"routes: {self.route_bytes:,} bytes, {ratio} of the {self.bound_bytes:,} bytes at the information "
                "bound"
            )
        return [*lines, *self._load_in_words()]

    def _gaps_in_words(self) -> str:
        if not self.gaps:
            return "no gaps"
        shown = [
            f"{place}: row {a}" if b == a + 1 else f"{place}: rows {a} to {b}" for place, a, b in self.gaps[:SHOWN_GAPS]
        ]
        rest = f", ... {len(self.gaps)} in all" if len(self.gaps) > SHOWN_GAPS else ""
        rows = sum(b - a for _, a, b in self.gaps)
        return f"{rows:,} missing ({', '.join(shown)}{rest})"

    def _load_in_words(self) -> list[str]:
        layers = self.layers()
        if not layers:
            return []
        lines = ["layer  load (largest over mean)  experts without a token"]
        return lines + [f"{one['layer']:>5}  {one['load']:>24.2f}  {one['unused']:>23}" for one in layers]
