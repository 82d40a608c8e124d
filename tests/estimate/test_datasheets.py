from __future__ import annotations

import re

import pytest

from twinphase.errors import InvalidRequestError
from twinphase.estimate.datasheets import DATASHEETS, find_datasheet
from twinphase.estimate.inputs import datasheet_hardware
from twinphase.estimate.options import PRECISIONS


@pytest.mark.parametrize("name", DATASHEETS)
def test_each_figure_has_its_source_or_its_formula(name):
    sheet = DATASHEETS[name]
    assert {figure for source in sheet.sources for figure in source.figures} == set(sheet.figures())
    assert set(sheet.peaks) <= set(PRECISIONS) and set(sheet.computed) <= set(sheet.figures())
    for source in sheet.sources:
        assert source.title and source.address.startswith("https://")


@pytest.mark.parametrize("name", DATASHEETS)
def test_a_computed_figure_is_what_its_formula_gives(name):
    sheet = DATASHEETS[name]
    for figure, formula in sheet.computed.items():
        unit = 1e9 if "GHz" in formula else 1e6
        value = unit
        for number in re.findall(r"(?:^|x )([\d.]+)", formula):
            value *= float(number)
        assert sheet.figures()[figure] == pytest.approx(value), formula


@pytest.mark.parametrize("name", [name for name in DATASHEETS if "fp16" in DATASHEETS[name].peaks])
def test_dense_peaks_stand_in_their_usual_ratios(name):
    """A figure with sparsity among dense ones would be twice what its neighbours say."""
    peaks = DATASHEETS[name].peaks
    assert peaks["bf16"] == peaks["fp16"]
    assert peaks["fp16"] / peaks["tf32"] == pytest.approx(2, rel=0.05)
    assert peaks["int8"] / peaks["fp16"] == pytest.approx(4 if name == "rtx-4090" else 2, rel=0.05)


def test_what_is_not_published_is_unknown():
    assert DATASHEETS["apple-m1"].bandwidth is None
    assert "bf16" not in DATASHEETS["apple-m4-max-40-gpu"].peaks
    assert "fp8" not in DATASHEETS["a100-80gb-sxm"].peaks
    assert datasheet_hardware("epyc-9654").peak("bf16") is None
    assert datasheet_hardware("epyc-9654").memory is None


def test_a_name_is_found_by_its_beginning_if_only_one_has_it():
    assert find_datasheet("H200").name == "h200-sxm"
    assert find_datasheet("RTX 4090").name == "rtx-4090"
    assert find_datasheet("apple-m2").name == "apple-m2"  # though others begin with it


@pytest.mark.parametrize(
    ("name", "named"), [("a100", "a100-40gb-pcie"), ("h300", "mi300x"), ("", "h100-sxm")]
)
def test_other_names_are_refused_with_those_that_exist(name, named):
    with pytest.raises(InvalidRequestError, match=named):
        find_datasheet(name)
