import pytest

from jengine.extras.diagnose.label_axes import explain_label_axes

IMAGES = "`CrossEntropy.label` must be class indices, integers of the shape of the logits f32[4,4,4,2] without classes, got i32[4]"
MISSPELLED = "`CrossEntropy.label` must be an entry of the batch, got 'lable'; the batch has image f32[64,8,8,1], label i32[64]"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (IMAGES, "the network keeps axes of its inputs"),
        ("`Accuracy.label` must fit the predictions: float[B, C], got f32[2] and i32[4]", "no axis of examples"),
        (MISSPELLED, None),
        ("`CrossEntropy.label` must be class indices, integers of the shape of the logits f32[64,10], got f32[64]", None),
    ],
)
def test_only_errors_about_axes_are_explained_by_axes(message, words):
    found = explain_label_axes(ValueError(message), {})
    assert found is None if words is None else words in found
