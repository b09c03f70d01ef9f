"""Hardware files: those that come with the package, and users' own. The only module that needs PyYAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmuon.foresight.hardware import PASSES, SCALARS, Fact, Hardware, MeasuredTable
from shardmuon.foresight.tables import Surface, of_triples

FOLDER = Path(__file__).parent / "data" / "hardware"
_OWN = f"For a machine of your own, copy {FOLDER / 'h100.yaml'} and write its numbers (docs/foresight.md says which)"


def names() -> tuple[str, ...]:
    """Names of the hardware files that come with the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def load(name: str | Path) -> Hardware:
    """The hardware of this name, or of this file.

    Raises:
        ImportError: PyYAML is missing.
        ValueError: There is none, or the file lacks something; the message says what to write.
    """
    text = str(name)
    path = Path(text) if text.endswith((".yaml", ".yml")) else FOLDER / f"{text.lower()}.yaml"
    if not path.is_file():
        if path.parent != FOLDER:
            raise ValueError(f"{text}: there is no such file. {_OWN}")
        raise ValueError(f"--gpu {text!r} is none of {', '.join(names())}, and no .yaml file. {_OWN}")
    yaml = _yaml()
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as wrong:
        line = " ".join(str(wrong).split())
        raise ValueError(f"{text}: it is no YAML ({line}). {_OWN}") from None
    return parse(found, str(name))


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(f"hardware files need PyYAML ({error}): pip install 'shardmuon[plan]'") from None
    return yaml


def parse(data: Any, where: str) -> Hardware:
    """A hardware file's content, checked.

    Raises:
        ValueError: See `load`.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: a hardware file is a mapping, found {type(data).__name__}")
    missing = [key for key in ("name", "title", "device", "flops", "facts", "products") if key not in data]
    lacking = [f"facts.{key} ({SCALARS[key]})" for key in SCALARS if key not in data.get("facts", {})]
    unknown = [f"facts.{key}" for key in data.get("facts", {}) if key not in SCALARS]
    if missing or lacking or unknown:
        raise ValueError(
            f"{where}: "
            + "; ".join(
                f"{what} {', '.join(names)}"
                for what, names in (("lacks", [*missing, *lacking]), ("has the unknown", unknown))
                if names
            )
        )
    try:
        together = data.get("together")
        return Hardware(
            name=str(data["name"]),
            title=str(data["title"]),
            device=str(data["device"]),
            flops={dtype: _fact(fact, f"flops.{dtype}") for dtype, fact in data["flops"].items()},
            facts={key: _fact(fact, f"facts.{key}") for key, fact in data["facts"].items()},
            products=_products(data["products"]),
            exchanges={int(row["ranks"]): _curve(row, 1.0) for row in data.get("exchanges", ())},
            passes={_pass(row): _curve(row, 0.0) for row in data.get("passes", ())},
            together=None if together is None else _curve(together, 0.0),
            notes=str(data.get("notes", "")),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as wrong:
        detail = f"a table lacks {wrong}" if isinstance(wrong, KeyError) else str(wrong)
        raise ValueError(f"{where}: {detail}") from wrong


def _fact(data: Any, name: str) -> Fact:
    if not isinstance(data, Mapping) or "source" not in data or "verified" not in data:
        raise ValueError(f"{name} must be {{value: .., source: .., verified: true|false}}, found {data!r}")
    low, high = (data["value"], data["value"]) if "value" in data else (data["low"], data["high"])
    return Fact(float(low), float(high), str(data["source"]), data["verified"] is True)


def _products(rows: Sequence[Mapping[str, Any]]) -> dict[str, MeasuredTable]:
    """One table for each thing multiplied; several aspects of one stand in several rows."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(str(row["of"]), []).append(row)
    return {
        of: MeasuredTable(
            "; ".join(dict.fromkeys(str(row["source"]) for row in group)),
            all(row["verified"] is True for row in group),
            surface=Surface(tuple(sorted((float(row.get("aspect", 1.0)), of_triples(row["rows"])) for row in group))),
        )
        for of, group in found.items()
    }


def _curve(row: Mapping[str, Any], slope: float) -> MeasuredTable:
    return MeasuredTable(str(row["source"]), row["verified"] is True, curve=of_triples(row["rows"], slope))


def _pass(row: Mapping[str, Any]) -> str:
    if row["of"] not in PASSES:
        raise ValueError(f"passes: of: {row['of']!r} is none of {', '.join(PASSES)}")
    return str(row["of"])
