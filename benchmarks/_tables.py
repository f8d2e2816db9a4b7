"""Markdown tables of `published.yaml`, made from the records in `results/`.

A table has a list `records`, and says which of their rows it takes, what a line is, and what its cells show:

    records   paths below results/, or mappings: `record`, one or a list, optionally with `where` as below and `set`.
              Without records, the table has its titles alone.
    set       fields for the rows of a record, or of all records that have no other
    where     field: value, or a list of values; rows with other values are left out
    rows      field: title of a column at the left; rows that agree in all these fields share a line
    columns   optional: a field that makes the columns, and `order`, their titles in order
    cells     title: format of a cell, with the fields of a row, as "{tokens_per_s:,.0f}"
    extra     title: [column, format] or [column, format, record], further cells of one column, at the right
    ratios    title: [field, column, column], the first column's value over the second's
    join      a field that distinguishes rows of one cell; they stand in the cell with slashes between them, or as one
              if all are alike
    measures  if true, each of the `cells` is a line instead of a column
    sort      fields to sort the rows by; without it they come in the order of the records

Besides what a record has, a row has `run` (date and commit), `minute`, `record`, and if it has an arm, `role` (stock,
liger or ours), `trainer`, `class`, `speed` and `memory`. The last two compare benchmarks that count different things.
"""

import json
import string
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
MISSING = "–"


def is_ours(name):
    return name.lower().startswith(("liger", "ours")) and name not in ("liger", "liger fp32")


def role(arm):
    """Which of the three trainers an arm is. Trainers in one comparison share a class, and all or none are compiled."""
    if is_ours(arm):
        return "ours"
    return "liger" if "+ Liger" in arm or arm == "trl_liger" else "stock"


def speed(row):
    """Useful tokens a second; rows or steps a second if the benchmark counts no tokens. Comparable within a record."""
    if row.get("tokens_per_s"):
        return row["tokens_per_s"]
    if row.get("rows_s"):
        return row["rows_s"]
    return 1000 / row["ms"] if row.get("ms") else None


def memory(row):
    """GiB: the peak of tensors, or what the driver counts if the benchmark has only that."""
    return row.get("gib") or row.get("gib_used")


def read(path):
    return json.loads((RESULTS / path).read_text())


def rows_of(record, path):
    """The rows of a record, with fields that tables show and records lack."""
    for row in record["rows"] if "rows" in record else compared(record):
        named = {"launcher": row["run"]} if "run" in row else {}  # of launchers.py
        named |= {f"gib_{kind}": gib for kind, gib in (row.get("gib_by_kind") or {}).items()}
        row = row | named | {"record": path, "run": f"{record['date'][:10]}, {record['commit']}"}
        row["minute"] = record["date"].removesuffix(" UTC").replace(" ", ", ")
        if "arm" in row:
            row |= {"role": role(row["arm"]), "speed": speed(row), "memory": memory(row)}
            row["trainer"] = f"**{row['arm']}**" if is_ours(row["arm"]) else row["arm"]
            row["class"] = row["arm"].removeprefix("Liger").replace(" + Liger", "").replace(" + compile", ", compiled")
        if "provider" in row:
            row["dtype"] = DTYPES[row.get("dtype", "bfloat16")]
        if "tied" in row:
            row["projection"] = "tied" if row["tied"] else "untied"
        if "tried" in row:
            row["fails"] = min((length for length, fits in row["tried"] if not fits), default=None)
        yield row


def compared(record):
    """The rows of a record of medusa_real.py: what its heads yield before and after training."""
    before, after = record["before"], record["after"]
    for k, (was, now) in enumerate(zip(before["accuracy"], after["accuracy"], strict=True), start=1):
        was, now = (value[0] if isinstance(value, list) else value for value in (was, now))  # older: by rank
        yield {"what": f"head {k}, accuracy", "before": was, "after": now}
    name = "tokens_per_pass" if "tokens_per_pass" in before else "chain"  # older: chain
    yield {"what": "tokens a pass", "before": before[name], "after": after[name]}


def entries(spec):
    """(path, entry) of each record of a table."""
    for entry in spec["records"]:
        entry = {"record": entry} if isinstance(entry, str) else entry
        for path in [entry["record"]] if isinstance(entry["record"], str) else entry["record"]:
            yield path, entry


def keeps(row, where):
    return all(row.get(name) in (want if isinstance(want, list) else [want]) for name, want in where.items())


def selected(spec):
    rows = []
    for path, entry in entries(spec):
        where = spec.get("where", {}) | entry.get("where", {})
        fields = spec.get("set", {}) | entry.get("set", {})
        rows += [row | fields for row in rows_of(read(path), path) if keeps(row, where)]
    if spec["records"] and not rows:
        raise ValueError(f"no row of {[path for path, _ in entries(spec)]} is as the table's where asks")
    if "sort" in spec:
        rows.sort(key=lambda row: [row[name] for name in spec["sort"]])
    return rows


def filled(form, row, with_note):
    """`form` with the fields of `row`. If one is missing: the row's note, which says why, or a dash."""
    fields = [field for _, field, _, _ in string.Formatter().parse(form) if field]
    if any(row.get(field) is None for field in fields):
        return row.get("note", MISSING) if with_note else MISSING
    return form.format(**row)


def cell(rows, form, join, slots, with_note=True):
    """The text of one cell, from its one row, or from each slot with slashes between them."""
    if join is None:
        if len(rows) > 1:
            raise ValueError(f"{len(rows)} rows fall into one cell, of {[row['record'] for row in rows]}; name a join")
        return filled(form, rows[0], with_note) if rows else MISSING
    found = {row[join]: filled(form, row, with_note) for row in rows}
    texts = [found.get(slot, MISSING) for slot in slots]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def ratio(rows, columns, name, over, under):
    """Column `over` divided by column `under` for one line. Both columns' rows are from one record."""
    values = {}
    for row in rows:
        if row.get(name) is not None:
            values.setdefault(row[columns], row[name])
    return f"{values[over] / values[under]:.2f}" if over in values and under in values else MISSING


def lines_of(spec):
    """(the titles, the cells of every line)."""
    columns, join = spec.get("columns"), spec.get("join")
    order = spec["order"] if columns else {None: ""}
    shown = {*order, *(column for column, *_ in spec.get("extra", {}).values())}
    rows = [row for row in selected(spec) if columns is None or row[columns] in shown]
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in spec["rows"]), []).append(row)
    cells, measures = spec["cells"], spec.get("measures", False)
    titles = list(spec["rows"].values()) + [""] * measures
    if columns is None:
        titles += list(cells)
    elif measures or len(cells) == 1:
        titles += list(order.values())
    else:
        for title in order.values():
            titles += [f"{title}: {name}" if title else name for name in cells]
    titles += [*spec.get("extra", {}), *spec.get("ratios", {})]

    lines = []
    for key, group in groups.items():
        slots = list(dict.fromkeys(row[join] for row in group)) if join else None

        def of(column, form, group=group, slots=slots, with_note=True):
            rows = [row for row in group if columns is None or row[columns] == column]
            return cell(rows, form, join, slots, with_note)

        left = ["" if part is None else str(part) for part in key]
        right = []
        for column, form, *record in spec.get("extra", {}).values():
            if record:  # only the row of that run
                found = [row for row in group if row[columns] == column and row["record"] == record[0]]
                right.append(cell(found, form, None, None, with_note=False))
            else:
                right.append(of(column, form, with_note=False))
        right += [ratio(group, columns, *parts) for parts in spec.get("ratios", {}).values()]
        if measures:
            for k, (name, form) in enumerate(cells.items()):
                first = left if k == 0 else [""] * len(left)
                lines.append([*first, name, *(of(column, form) for column in order)])
        else:
            line = list(left)
            for column in order:
                line += [of(column, form) for form in cells.values()]
            lines.append(line + right)
    return titles, lines


def markdown(spec):
    titles, lines = lines_of(spec)
    left = len(spec["rows"]) + spec.get("measures", False)
    rule = ["---"] * left + ["---:"] * (len(titles) - left)
    head = [f"| {' | '.join(titles)} |", f"|{'|'.join(rule)}|"]
    return "\n".join(head + [f"| {' | '.join(line)} |" for line in lines])
