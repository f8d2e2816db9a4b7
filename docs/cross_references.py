"""For the site: names that docstrings put into brackets, such as [`~trl.SFTTrainer`], are shown without them."""

import re

IN_TEXT = re.compile(r"\[<code>~?([\w.]+)</code>\]")
IN_TYPE = re.compile(
    r"<code>([^<\n]*`[^<\n]*)</code>"
)  # of an argument, where mkdocstrings leaves the Markdown as it is
MARKS = re.compile(r"\[`~?|`\]|`")


def on_page_content(html, **kwargs):
    html = IN_TYPE.sub(lambda found: f"<code>{MARKS.sub('', found[1])}</code>", html)
    return IN_TEXT.sub(r"<code>\1</code>", html)
