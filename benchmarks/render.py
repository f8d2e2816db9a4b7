"""Write every table and figure of README.md and docs/ from the records that `published.yaml` lists for it.

    python benchmarks/render.py            what `make figures` runs
    python benchmarks/render.py --check    writes nothing; exits with 1 and names what would change, if anything would

It replaces the text between `<!-- begin table: ID -->` and `<!-- end table: ID -->` in a page. The file of a figure
holds a digest of its sources, so `--check` knows whether the figure is up to date. The pixels would not do, because
versions of matplotlib draw them differently.
"""

import argparse
import hashlib
import json
import re
import sys

import yaml
from _tables import HERE, RESULTS, entries, markdown, read

ROOT = HERE.parent
BLOCK = re.compile(r"(<!-- begin table: (?P<id>[\w.-]+) -->\n).*?(<!-- end table: (?P=id) -->)", re.DOTALL)
DIGEST = "Records"  # the name of a PNG's digest


def published():
    return yaml.safe_load((HERE / "published.yaml").read_text())


def listed(plan):
    """Every record that a table or figure uses, that a sentence quotes, or that newer ones have replaced."""
    found = []
    for spec in (*plan["tables"].values(), *plan["figures"].values()):
        found += [path for path, _ in entries(spec)]
    for paths in plan["quoted"].values():
        found += paths
    found += plan["older"]
    return list(dict.fromkeys(found))


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def with_tables(text, tables, page):
    """The text of a page with every table rendered again."""

    def block(found):
        if found["id"] not in tables:
            raise ValueError(f"{page} has a table {found['id']}, which benchmarks/published.yaml does not")
        return found[1] + markdown(tables[found["id"]]) + "\n" + found[3]

    made = BLOCK.sub(block, text)
    marks = len(re.findall(r"<!-- (?:begin|end) table:", text))
    blocks = len(BLOCK.findall(text))
    if marks != 2 * blocks:
        raise ValueError(f"{page} has {marks} marks of tables and {blocks} tables; each begins and ends with its ID")
    return made


def digest(spec):
    """A digest of a figure's sources: its entry, its records, and the code that draws."""
    parts = [json.dumps(spec, sort_keys=True), (HERE / "figures.py").read_text()]
    parts += [(RESULTS / path).read_text() for path, _ in entries(spec)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def digest_in(path):
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as image:
        return image.info.get(DIGEST)


def draw(spec, path, mark):
    import figures
    import matplotlib.pyplot as plt

    figure = getattr(figures, spec["draw"])([read(record) for record, _ in entries(spec)], **spec.get("options", {}))
    figure.savefig(path, dpi=160, metadata={DIGEST: mark})
    plt.close(figure)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if anything would change")
    options = parser.parse_args(argv)
    plan, changed = published(), []
    for page in pages():
        text = page.read_text()
        made = with_tables(text, plan["tables"], page.name)
        if made != text:
            changed.append(page)
            if not options.check:
                page.write_text(made)
    for name, spec in plan["figures"].items():
        path, mark = ROOT / name, digest(spec)
        if digest_in(path) != mark:
            changed.append(path)
            if not options.check:
                draw(spec, path, mark)
    for path in changed:
        print(f"{path.relative_to(ROOT)} {'is not what the records say' if options.check else 'written'}")
    if options.check and changed:
        sys.exit("run `make figures` (python benchmarks/render.py) and commit what it writes")


if __name__ == "__main__":
    main()
