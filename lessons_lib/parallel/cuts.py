"""Which layers of a model each stage of a pipeline holds. Imports no torch."""

from __future__ import annotations

from numbers import Integral


def layers_of_stages(layers: int, stages: int, given=None) -> list[range]:
    """Which layers each stage holds, in order. Where `stages` does not divide, the ones in the middle have one more.

    So the first stage, with the embedding, and the last, with the logits, are the lighter ones. `given`: how many each shall have.
    """
    layers, stages = whole(layers, "layers", 1, 10_000), whole(stages, "stages", 1, 10_000)
    if given is None:
        if stages > layers:
            raise ValueError(
                f"{layers} layers cannot fill {stages} stages: take at most {layers} stages, or say how many layers each has, as "
                "layers=[0, 2, 2, 0] (the first stage also has the embedding, the last the logits)."
            )
        each, extra = divmod(layers, stages)
        first = (stages - extra + 1) // 2
        given = [each + (first <= stage < first + extra) for stage in range(stages)]
    if not isinstance(given, (list, tuple)) or len(given) != stages:
        raise ValueError(f"layers must be a list of {stages} numbers, how many layers each stage has, not {given!r}.")
    counts = [whole(count, f"The number of layers of stage {stage}", 0, layers) for stage, count in enumerate(given)]
    if sum(counts) != layers:
        raise ValueError(
            f"layers={given!r} are {sum(counts)} layers in all, but the model has {layers}: the list must add up to it."
        )
    if 0 in counts[1:-1]:
        raise ValueError(f"layers={given!r}: only the first and the last stage may be without layers.")
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts)]


def whole(value, what: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{what} must be a whole number from {low} to {high:,}, not {value!r} (a {type(value).__name__}).")
    if not low <= value <= high:
        raise ValueError(f"{what} is {value}, but must be a whole number from {low} to {high:,}.")
    return int(value)
