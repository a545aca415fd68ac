# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Where the bytes of a page lie, on the device and on the host (D6, D7, D10).

A *page* is `block_size` tokens of all layers. On the host it is one page of each
layer's dense tensor. On the device it is a *frame* of 1 + G blocks of `block_bytes`
each: block 0 holds the pages of all indexer layers, block 1 + g those of the latent
layers of *stack* g. Latents are packed by bytes, not by index unit: layers of one unit
may lie in neighbouring stacks.

Pure Python, standard library only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm

ROW_ALIGNMENT = 16
"""Rows are moved by 16-byte accesses (D24), blocks by 16-byte aligned copies."""


@dataclass(frozen=True)
class LatentLayer:
    """A layer's MLA latent cache. `layer` is its number in the model."""

    name: str
    layer: int
    row_bytes: int


@dataclass(frozen=True)
class IndexerLayer:
    """A leader's indexer cache. A page of it is `block_size * token_bytes` bytes."""

    name: str
    layer: int
    token_bytes: int


@dataclass(frozen=True)
class LatentPlace:
    """Latent layer in its stack: page of block b at `b * block_bytes + byte_offset`.

    Attributes:
        stack: g in 0..G-1; the layer's blocks are column 1 + g of `frame_blocks`.
        index: place in the stack, 0..R-1.
        byte_offset: `index * latent_page_bytes`.
        unit: index of the layer's unit in `DevicePlan.units`.
    """

    name: str
    layer: int
    stack: int
    index: int
    byte_offset: int
    unit: int


@dataclass(frozen=True)
class IndexerPlace:
    """Indexer layer in the indexer block; it leads the unit with the same index."""

    name: str
    layer: int
    index: int
    byte_offset: int


@dataclass(frozen=True)
class IndexUnit:
    """A leader and its followers: the layers that share one top-k selection.

    Attributes:
        leader: index into `DevicePlan.indexers`.
        latents: indices into `DevicePlan.latents`, the leader's own latent first.
        stacks: stacks these latents lie in, ascending; the plan of the unit is
            translated to physical rows once for each (D22).
    """

    leader: int
    latents: tuple[int, ...]
    stacks: tuple[int, ...]


@dataclass(frozen=True)
class HostLayer:
    """A layer's dense tensor `uint8 [num_pages, page_bytes]` of the host pool."""

    name: str
    page_bytes: int


@dataclass(frozen=True)
class DevicePlan:
    """Geometry of the device pool and of a host page. Sizes are in bytes.

    Attributes:
        block_size: tokens of a page.
        block_bytes: B, bytes of one block; a multiple of `row_bytes` and of 16.
        layers_per_stack: R.
        num_stacks: G.
        row_bytes: bytes of one token in one latent layer.
        indexer_token_bytes: bytes of one token in one indexer layer.
        latents: in model order.
        indexers: in model order.
        units: one for each indexer, in the same order.
    """

    block_size: int
    block_bytes: int
    layers_per_stack: int
    num_stacks: int
    row_bytes: int
    indexer_token_bytes: int
    latents: tuple[LatentPlace, ...]
    indexers: tuple[IndexerPlace, ...]
    units: tuple[IndexUnit, ...]

    @property
    def frame_blocks(self) -> int:
        """Blocks of a frame: the indexer block and one of each stack."""
        return 1 + self.num_stacks

    @property
    def latent_page_bytes(self) -> int:
        """Page of one latent layer, and the layer stride inside a stack's block."""
        return self.block_size * self.row_bytes

    @property
    def indexer_page_bytes(self) -> int:
        """Page of one indexer layer, and the layer stride in the indexer block."""
        return self.block_size * self.indexer_token_bytes

    @property
    def rows_per_block(self) -> int:
        """Block stride in flat rows: block b, offset o is row b * this + o."""
        return self.block_bytes // self.row_bytes

    @property
    def resident_token_bytes(self) -> float:
        """Device bytes of one token of a resident page."""
        return self.frame_blocks * self.block_bytes / self.block_size

    @property
    def ideal_token_bytes(self) -> int:
        """Bytes of one token in all layers, without padding."""
        return self.host_page_bytes // self.block_size

    @property
    def host_layers(self) -> tuple[HostLayer, ...]:
        """Layers in the order of the host pool: latents, then indexers."""
        latents = (HostLayer(p.name, self.latent_page_bytes) for p in self.latents)
        indexers = (HostLayer(p.name, self.indexer_page_bytes) for p in self.indexers)
        return (*latents, *indexers)

    @property
    def host_page_bytes(self) -> int:
        """Bytes of one host page over all layers; host pages have no padding."""
        return (
            len(self.latents) * self.latent_page_bytes
            + len(self.indexers) * self.indexer_page_bytes
        )

    def host_layer_offsets(self, num_pages: int) -> tuple[int, ...]:
        """Byte offset of each layer's tensor in a host pool of `num_pages` pages.

        Args:
            num_pages: pages of the pool, the null page included.

        Returns:
            One offset for each entry of `host_layers`. A layer's page p starts
            `p * page_bytes` further; a row's place is computed in 64 bits (D10).
        """
        sizes = (layer.page_bytes * num_pages for layer in self.host_layers)
        return tuple(accumulate(sizes, initial=0))[:-1]

    def stack_latents(self, stack: int) -> tuple[LatentPlace, ...]:
        """Latent layers of one stack, in block order."""
        first = stack * self.layers_per_stack
        return self.latents[first : first + self.layers_per_stack]


def plan_device(
    latents: Sequence[LatentLayer], indexers: Sequence[IndexerLayer], block_size: int
) -> DevicePlan:
    """Choose the geometry with the least device bytes per resident token (D7).

    Ties go to fewer stacks, which means fewer blocks to allocate for a page. The
    indexer block is not split over several blocks: for GLM-5.3 that gains nothing with
    656 and 576-byte rows (57,072 and 50,112 bytes per token against 55,760 and 49,419),
    and 2.4 % with 1,152-byte rows at the price of 79 stacks instead of 20.

    Args:
        latents: all latent layers, drafter included, by ascending `layer`.
        indexers: all indexer layers, by ascending `layer`; one latent or more.
        block_size: tokens of a page.

    Returns:
        The plan; the same for the same arguments, in every process.

    Raises:
        ValueError: the layers cannot be packed, with the reason.
    """
    row_bytes, token_bytes = _check_layers(latents, indexers, block_size)
    _, num_stacks, block_bytes, layers_per_stack = min(
        _candidates(len(latents), len(indexers), row_bytes, token_bytes, block_size)
    )
    leaders = _leader_of_each_latent(latents, indexers)
    places = tuple(
        LatentPlace(
            name=latent.name,
            layer=latent.layer,
            stack=i // layers_per_stack,
            index=i % layers_per_stack,
            byte_offset=i % layers_per_stack * block_size * row_bytes,
            unit=leaders[i],
        )
        for i, latent in enumerate(latents)
    )
    return DevicePlan(
        block_size=block_size,
        block_bytes=block_bytes,
        layers_per_stack=layers_per_stack,
        num_stacks=num_stacks,
        row_bytes=row_bytes,
        indexer_token_bytes=token_bytes,
        latents=places,
        indexers=tuple(
            IndexerPlace(ix.name, ix.layer, i, i * block_size * token_bytes)
            for i, ix in enumerate(indexers)
        ),
        units=_units(places, len(indexers)),
    )


def _candidates(
    num_latents: int, num_indexers: int, row_bytes: int, token_bytes: int, tokens: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (bytes of a frame, G, B, R) for every R; the least one is the plan."""
    # A block is a whole number of rows, so that rows have one flat number space, and
    # 16-byte aligned for the bulk copies of the indexer kernels.
    unit = lcm(row_bytes, ROW_ALIGNMENT)
    indexer_bytes = num_indexers * tokens * token_bytes
    for layers_per_stack in range(1, num_latents + 1):
        content = max(indexer_bytes, layers_per_stack * tokens * row_bytes)
        block_bytes = -(-content // unit) * unit
        num_stacks = -(-num_latents // layers_per_stack)
        frame_bytes = (1 + num_stacks) * block_bytes
        yield frame_bytes, num_stacks, block_bytes, layers_per_stack


def _leader_of_each_latent(
    latents: Sequence[LatentLayer], indexers: Sequence[IndexerLayer]
) -> list[int]:
    """Index of the last indexer at or before each latent (IndexShare)."""
    leaders = []
    leader = -1
    for latent in latents:
        if leader + 1 < len(indexers) and indexers[leader + 1].layer == latent.layer:
            leader += 1
        if leader < 0:
            raise ValueError(
                f"HiSparse: layer {latent.name} has no indexer at or before it, so it "
                "has no top-k rows to read. Remedy: serve this model without HiSparse."
            )
        leaders.append(leader)
    if leader + 1 != len(indexers):
        raise ValueError(
            f"HiSparse: indexer {indexers[leader + 1].name} belongs to no latent "
            "layer. Remedy: serve this model without HiSparse."
        )
    return leaders


def _units(places: Sequence[LatentPlace], num_units: int) -> tuple[IndexUnit, ...]:
    members: list[list[int]] = [[] for _ in range(num_units)]
    for i, place in enumerate(places):
        members[place.unit].append(i)
    return tuple(
        IndexUnit(u, tuple(m), tuple(sorted({places[i].stack for i in m})))
        for u, m in enumerate(members)
    )


def _check_layers(
    latents: Sequence[LatentLayer], indexers: Sequence[IndexerLayer], block_size: int
) -> tuple[int, int]:
    """Return the bytes of a latent row and of an indexer token.

    Raises:
        ValueError: a layer is missing, or they differ, or they are not aligned.
    """
    if block_size < 1:
        raise ValueError(f"HiSparse: block size {block_size}; allowed: 1 or more.")
    if not latents or not indexers:
        raise ValueError(
            f"HiSparse: {len(latents)} MLA latent layers and {len(indexers)} indexer "
            "layers; it needs at least one of each. Remedy: serve a DeepSeek sparse "
            "attention model (GLM-5, DeepSeek V3.2), or switch HiSparse off."
        )
    for layers in (latents, indexers):
        numbers = [layer.layer for layer in layers]
        if numbers != sorted(set(numbers)):
            raise ValueError(f"HiSparse: layers out of model order: {numbers}.")
    rows = {latent.row_bytes for latent in latents}
    tokens = {indexer.token_bytes for indexer in indexers}
    if len(rows) > 1 or len(tokens) > 1:
        raise ValueError(
            f"HiSparse: rows of {sorted(rows)} bytes in the latent layers and of "
            f"{sorted(tokens)} bytes in the indexer layers; all latent layers, and all "
            "indexer layers, must be alike. Remedy: use one KV cache dtype for the "
            "model and its drafter."
        )
    (row_bytes,), (token_bytes,) = rows, tokens
    page_bytes = block_size * token_bytes
    if row_bytes < 1 or row_bytes % ROW_ALIGNMENT or page_bytes % ROW_ALIGNMENT:
        raise ValueError(
            f"HiSparse: latent rows of {row_bytes} bytes and indexer pages of "
            f"{page_bytes} bytes; both must be multiples of {ROW_ALIGNMENT}. Remedy: "
            "choose another --kv-cache-dtype or --block-size, or serve this model "
            "without HiSparse."
        )
    return row_bytes, token_bytes
