"""TMA tensor copies and reductions, and clusters, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .kernels import cluster, tma
from .kernels.launch import launch
from .kernels.tma import BOXES, COLUMNS, REDUCE_BOX, REDUCTIONS, ROWS, SPANS


def padded(rows: int, columns: int, pitch: int, fill: float) -> torch.Tensor:
    """A float16 matrix with a row pitch (elements) and its own values everywhere."""
    return torch.full((rows, pitch), fill, dtype=torch.float16)[:, :columns]


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (45, 72), (3, 200)])
@pytest.mark.parametrize("swizzle", SPANS)
def test_swizzle(swizzle: str, rows: int, columns: int, swizzle_kernels: dict[str, object]) -> None:
    tiles = (-(-rows // ROWS), -(-columns // COLUMNS))
    source = padded(rows, columns, columns + 8, 0)
    source[:] = torch.from_numpy(np.arange(rows * columns).reshape(rows, columns) % 2039)
    target = padded(rows, columns, columns + 24, -7)
    raw = torch.empty(tiles[0] * tiles[1], ROWS * COLUMNS // 2, dtype=torch.uint32)
    if swizzle not in swizzle_kernels:
        swizzle_kernels[swizzle] = tma.build_swizzle(swizzle)
    launch(swizzle_kernels[swizzle], source, raw, target, outputs=(raw,))
    assert torch.equal(target, source)
    whole = torch.empty(0, dtype=torch.float16).set_(target.untyped_storage())
    assert (whole.reshape(rows, -1)[:, columns:] == -7).all(), "stored beyond the tensor's end"
    full = np.zeros((tiles[0] * ROWS, tiles[1] * COLUMNS), np.uint16)
    full[:rows, :columns] = source.numpy().view(np.uint16)
    for x in range(tiles[0]):
        for y in range(tiles[1]):
            piece = full[x * ROWS : (x + 1) * ROWS, y * COLUMNS : (y + 1) * COLUMNS]
            got = raw[x + tiles[0] * y].numpy().view(np.uint16)
            np.testing.assert_array_equal(got, tma.swizzled(piece, SPANS[swizzle]))


@pytest.fixture(scope="module")
def swizzle_kernels() -> dict[str, object]:
    return {}


@pytest.mark.parametrize("rank", BOXES)
def test_dimensions(rank: int) -> None:
    box = BOXES[rank]
    goal = tma.target_box(box)
    storage = np.random.default_rng(rank).standard_normal(box.span).astype(np.float32)
    target = np.full(goal.span, -7, np.float32)
    raw = torch.empty(int(np.prod(box.tiles)), int(np.prod(box.box)))
    views = [
        torch.as_strided(torch.from_numpy(x), b.shape, b.stride)
        for x, b in ((storage, box), (target, goal))
    ]
    launch(tma.build_dimensions(rank), views[0], raw, views[1], outputs=(raw,))
    values = box.view(storage)
    np.testing.assert_array_equal(goal.view(target), values)
    untouched = np.ones(goal.span, bool)
    goal.view(untouched)[...] = False
    assert (target[untouched] == -7).all(), "stored into the gaps"
    for cta in range(raw.shape[0]):
        coordinate = tuple(int(i) for i in np.unravel_index(cta, box.tiles, order="F"))
        np.testing.assert_array_equal(raw[cta].numpy(), box.tile(values, coordinate))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name: str) -> None:
    reduction = REDUCTIONS[name]
    source, target = tma.reduction_inputs(reduction)
    before = target.copy()
    view = torch.bfloat16 if name == "add.bf16" else None
    tensors = []
    for storage in (source, target):
        tensor = torch.from_numpy(storage)
        tensor = tensor.view(view) if view else tensor
        tensors.append(torch.as_strided(tensor, REDUCE_BOX.shape, REDUCE_BOX.stride))
    size = int(np.prod(REDUCE_BOX.box))
    unused = torch.empty(int(np.prod(REDUCE_BOX.tiles)), size, dtype=tensors[0].dtype)
    launch(tma.build_reduction(name), tensors[0], unused, tensors[1], outputs=())
    np.testing.assert_array_equal(target, reduction.expect(before, source))


def test_exchange() -> None:
    ctas = cluster.CLUSTER * cluster.CLUSTERS
    source = np.random.default_rng(1).integers(0, 1 << 31, (ctas, cluster.THREADS), dtype=np.uint32)
    result = torch.empty(cluster.WAYS, ctas, cluster.THREADS, dtype=torch.uint32)
    launch(cluster.build_exchange(), torch.from_numpy(source), result, outputs=(result,))
    peer = source[np.arange(ctas) ^ 1]
    for way in range(cluster.WAYS):
        np.testing.assert_array_equal(result[way].numpy(), peer + np.uint32(way), f"way {way}")


def test_multicast() -> None:
    shape = (cluster.CLUSTERS, cluster.ROWS, cluster.COLUMNS)
    source = torch.from_numpy(np.random.default_rng(1).integers(-99, 99, shape)).float()
    result = torch.empty(cluster.CLUSTERS, cluster.CLUSTER, *shape[1:])
    launch(cluster.build_multicast(), source, result, outputs=(result,))
    want = source + 2 * torch.roll(source, -1, 0)
    assert torch.equal(result, want[:, None].expand_as(result))
