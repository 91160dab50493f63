"""The picture is well-formed, and its bars are as long as its figures say."""

from xml.etree import ElementTree

import pytest

from effasr.planning.report import Panel, draw

SVG = "{http://www.w3.org/2000/svg}"


def widths(picture, kind):
    rects = ElementTree.fromstring(picture).iter(f"{SVG}rect")
    return [float(rect.attrib["width"]) for rect in rects if rect.attrib["class"] == kind]


def test_lengths_of_bars():
    panels = [
        Panel("share", [0.25, 1.0], ["75", "0"], [0.75, 0.0]),
        Panel("seconds", [3.0, 1.5], ["3.0", "1.5"]),
    ]
    picture = draw(["a", "b"], panels, title="t")
    full = max(widths(picture, "filled"))
    assert widths(picture, "filled") == [full / 4, full, full, full / 2]
    assert widths(picture, "rest") == [full * 3 / 4, 0, 0, 0]


def test_everything_is_inside_and_names_are_escaped():
    panels = [Panel("<p>", [1.0, 0.0], ["&", '"'])] * 3
    picture = draw(["<script>", "b"], panels, title='"t" & <u>', legend=("x", "y"))
    root = ElementTree.fromstring(picture)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"<script>", "<p>", '"t" & <u>', "&", "x", "y"} <= set(texts)
    assert root.attrib["aria-label"] == '"t" & <u>'
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
    assert "prefers-color-scheme: dark" in picture


def test_bars_of_no_length():
    assert max(widths(draw(["a"], [Panel("p", [0.0], ["0"])], title="t"), "filled")) == 0


def test_a_heading_where_the_group_changes():
    panels = [Panel("p", [1.0] * 3, ["1"] * 3)]
    picture = draw(["a", "b", "c"], panels, title="t", groups=["one", "one", "two"])
    texts = [text.text for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    assert (texts.count("one"), texts.count("two")) == (1, 1)
    tops = [float(r.attrib["y"]) for r in ElementTree.fromstring(picture).iter(f"{SVG}rect")][::2]
    assert tops[2] - tops[1] == 2 * (tops[1] - tops[0])


def test_a_bar_for_each_row():
    with pytest.raises(ValueError, match="'p' must have 2 bars, one for each row"):
        draw(["a", "b"], [Panel("p", [1.0], ["1"])], title="t")
