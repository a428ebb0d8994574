"""Which family and variant a tree of leaves is of, found without any file."""

import pytest

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping import Family, stack, tensor
from orbax_safetensors.mapping.family import StateWrapper, wrapper_of
from orbax_safetensors.mapping.inference import fit
from tests.support.family_samples import TREES, Sample

CONFIG = {"layers": 3}
SHAPES = {f"{i}.w": (4, 2) for i in range(3)}
EACH = [{"stacked": True}, {"stacked": True, "axis": 1}, {"stacked": False}]


def layers(config, *, stacked=True, axis=0):
    views = [tensor(f"{i}.w", (4, 2)) for i in range(config["layers"])]
    return {"params.w": stack(views, axis)} if stacked else {f"params.w_{i}": view for i, view in enumerate(views)}


TOY = Family("toy.layers", ("Toy",), layers, variants=lambda leaves: EACH)


@pytest.mark.parametrize(("name", "mode"), TREES)
def test_maxtexts_trees(name, mode):
    sample, scan_layers = Sample(name), mode == "scanned"
    leaves = {path: array.shape for path, array in sample.made_by_maxtext(scan_layers).items()}
    for known in (leaves, dict.fromkeys(leaves)):
        found = fit([sample.family], sample.config, known, sample.shapes)
        assert found.variant["scan_layers"] == scan_layers
        assert found.variant.get("param_scan_axis", 1) == 1
        assert found.variant.get("mtp", sample.mtp or None) == (
            None if sample.mtp or "mtp" not in found.variant else False
        )
        assert found.paths == {path: path for path in leaves}


@pytest.mark.parametrize(
    ("leaves", "variant"),
    [
        ({"params.w": (3, 4, 2)}, EACH[0]),
        ({"params.w": (4, 3, 2)}, EACH[1]),
        ({"params.w": None}, EACH[0]),
        ({f"params.w_{i}": (4, 2) for i in range(3)}, EACH[2]),
    ],
    ids=["stacked", "another axis", "no shape", "one by one"],
)
def test_the_first_variant_that_fits(leaves, variant):
    for above, below in (("", ""), ("params.", ""), ("", ".value"), ("params.", ".value")):
        named = {f"{above}{name}{below}": shape for name, shape in leaves.items()}
        found = fit([TOY], CONFIG, named, SHAPES)
        assert found.variant == variant
        assert found.paths == {f"{above}{name}{below}": name for name in leaves}
    alone = {name.removeprefix("params."): shape for name, shape in leaves.items()}
    assert fit([TOY], CONFIG, alone, SHAPES).paths == {name.removeprefix("params."): name for name in leaves}


def test_switches_that_are_set_stay():
    family = Family("toy.set", ("Toy",), layers, variants=TOY.variants, variant={"stacked": True})
    assert fit([family], CONFIG, {"w": (4, 3, 2)}, SHAPES).variant == EACH[1]
    with pytest.raises(MappingError, match=r"toy.set: no variant .*\{'stacked': True\}: params.w is missing"):
        fit([family], CONFIG, {f"w_{i}": (4, 2) for i in range(3)}, SHAPES)


def test_a_family_that_does_not_say_has_its_defaults():
    family = Family("toy.plain", ("Toy",), layers)
    assert fit([family], CONFIG, {"w": (3, 4, 2)}, SHAPES).variant == {}
    with pytest.raises(MappingError, match=r"params.w, of '0.w', .*: expected \(3, 4, 2\), found \(4, 3, 2\)"):
        fit([family], CONFIG, {"w": (4, 3, 2)}, SHAPES)


def test_the_nearest_is_what_an_error_is_about():
    leaves = {**{f"w_{i}": (4, 2) for i in range(3)}, "w_1": (4, 4)}
    with pytest.raises(MappingError, match=r"nearest is \{'stacked': False\}: params.w_1, of '1.w': expected \(4, 2\)"):
        fit([TOY], CONFIG, leaves, SHAPES)


def test_families_that_both_fit():
    other = Family("other.layers", ("Toy",), layers)
    with pytest.raises(MappingError, match="several .*: other.layers, toy.layers; register one"):
        fit([TOY, other], CONFIG, {"w": (3, 4, 2)}, SHAPES)
    assert fit([TOY, other], CONFIG, {"w": (4, 3, 2)}, SHAPES).family is TOY


@pytest.mark.parametrize("families", [[], [Family("toy.none", (), layers, variants=lambda leaves: [])]])
def test_nothing_to_choose_from(families):
    with pytest.raises(MappingError, match="no registered family has a tree of these leaves"):
        fit(families, CONFIG, {"w": (3, 4, 2)}, SHAPES)


@pytest.mark.parametrize("variants", [lambda leaves: leaves["nothing"], lambda leaves: [3], lambda leaves: None])
def test_variants_that_fail(variants):
    with pytest.raises(MappingError, match="toy.wrong: no variants follow from these leaves: "):
        fit([Family("toy.wrong", (), layers, variants=variants)], CONFIG, {"w": (3, 4, 2)}, SHAPES)


def test_a_config_that_no_tree_follows_from():
    with pytest.raises(MappingError, match="toy.layers: config.json has no 'layers'"):
        fit([TOY], {}, {"w": (3, 4, 2)}, SHAPES)


def test_a_family_has_the_switches_that_are_set():
    """In what is written around its tree, too."""
    unscanned = Family(
        "maxtext.toy", (), layers, variant={"scan_layers": False}, wrapper=StateWrapper(switches={"scan_layers": True})
    )
    assert wrapper_of(unscanned, None).custom_metadata == {"scan_layers": False}
    assert wrapper_of(unscanned, {"scan_layers": True}).custom_metadata == {"scan_layers": True}


class TestUse:
    """The switches of a family as they are recorded."""

    FAMILY = Family(
        "mine.model",
        (),
        lambda config, *, size, stacked=True, spelling="new", other=None: {},
        configured_as=lambda config: {"size": config["size"]},
        stored_as=lambda shapes: {"spelling": "old"},
    )

    def test_it_has_all_that_have_a_value(self):
        use = self.FAMILY.use({"size": 3}, None, {"stacked": False})
        assert use == ("mine.model", {"size": 3, "stacked": False, "spelling": "new"})

    def test_what_files_decide_is_left_out(self):
        assert self.FAMILY.use({"size": 3}, {"a": (1,)}, {}).variant == {"size": 3, "stacked": True}

    def test_what_json_cannot_hold_is_not_recorded(self):
        assert self.FAMILY.use({"size": {4}}, None, {}).record()["variant"] == {"stacked": True, "spelling": "new"}

    def test_a_record_comes_before_the_config_and_after_the_variant(self):
        family = self.FAMILY.recalling({"family": "mine.model", "variant": {"size": 5, "stacked": False, "gone": 1}})
        assert family.use({"size": 3}, None, {"stacked": True}).variant == {
            "size": 5,
            "stacked": True,
            "spelling": "new",
        }

    def test_the_record_of_another_family_counts_for_nothing(self):
        for record in (None, 3, {}, {"family": "mine.other", "variant": {"size": 5}}, {"family": "mine.model"}):
            assert self.FAMILY.recalling(record).use({"size": 3}, None, {}).variant["size"] == 3

    def test_an_error_of_the_function_is_one_of_the_config(self):
        with pytest.raises(
            MappingError, match=r"mine.model: no switches follow from this config.json: KeyError\('size'\)"
        ):
            self.FAMILY.describe({}, {}, lambda name, shape: None)
