"""What a plan hands to the workers: groups, tensors and the whole cache's configuration."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from k3backend.common.errors import InputError, ShapeError
from k3backend.common.kv_dtype import DType, KVQuantMode
from k3backend.common.kv_spec_base import AttentionSpec, KVCacheSpec
from k3backend.common.kv_spec_state import MambaSpec
from k3backend.common.kv_spec_uniform import iter_layer_specs

if TYPE_CHECKING:
    import torch

_BlockIds = TypeVar("_BlockIds")


class KVCacheGroupRole(str, enum.Enum):
    """What a group is for, beyond an ordinary cache."""

    DEFAULT = "default"
    HISPARSE_SOURCE = "hisparse_source"
    HISPARSE_INDEXER = "hisparse_indexer"


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """Where layers of one shape lie in their backing allocation.

    Block ``b`` of ``layers[l]`` starts at byte ``offset + l * layer_stride + b * block_stride``.
    Tensors may overlap: a block ID belongs to one group at a time.

    Attributes:
        size: bytes of the backing allocation.
        layers: layer names, in the order of the layer axis.
        layer_stride, block_stride, offset: bytes.
        host_resident: whether the allocation is in host memory.
    """

    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0
    host_resident: bool = False


@dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share one block table.

    Attributes:
        layer_names: the layers, in order.
        kv_cache_spec: their merged spec, or one spec per layer (UniformTypeKVCacheSpecs).
        is_eagle_group: whether it holds draft layers and drops a drafter's last block.
        host_resident: whether its blocks come from the host pool.
        enable_kv_transfer: whether its blocks go to another instance; replicas are rebuilt.
        role: what the group is for.
    """

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    is_eagle_group: bool = False
    host_resident: bool = False
    enable_kv_transfer: bool = True
    role: KVCacheGroupRole = KVCacheGroupRole.DEFAULT


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The cache of one worker.

    Attributes:
        num_blocks: block IDs of the device pool, the null block among them.
        kv_cache_tensors: where the layers lie.
        kv_cache_groups: the groups, in the order of their IDs.
        prefix_cache_retention_interval: tokens between retained prefix checkpoints.
        kv_cache_layout: name of the physical order.
        hash_block_size: tokens per prefix-cache hash.
        cache_hit_alignment_tokens: tokens that a prefix hit is a multiple of.
        hisparse_host_num_blocks: block IDs of the host pool.
        hisparse_host_block_stride: bytes between host blocks.
        hisparse_shared_host_pool: whether local ranks share one host pool.
        kv_tp_replicas: consecutive tensor-parallel ranks with the same contents; 1: none.
    """

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[KVCacheGroupSpec]
    prefix_cache_retention_interval: int | None = None
    kv_cache_layout: str | None = None
    hash_block_size: int | None = None
    cache_hit_alignment_tokens: int | None = None
    hisparse_host_num_blocks: int | None = None
    hisparse_host_block_stride: int | None = None
    hisparse_shared_host_pool: bool = False
    kv_tp_replicas: int = 1

    @property
    def transfer_group_ids(self) -> tuple[int, ...]:
        """IDs of the groups whose blocks are transferred."""
        return tuple(i for i, g in enumerate(self.kv_cache_groups) if g.enable_kv_transfer)

    @property
    def transfer_groups(self) -> tuple[KVCacheGroupSpec, ...]:
        """The groups whose blocks are transferred."""
        return tuple(self.kv_cache_groups[i] for i in self.transfer_group_ids)

    @property
    def transfer_group_index_by_layer(self) -> dict[str, int]:
        """Layer name -> index into ``transfer_groups``."""
        return {
            layer: index
            for index, group in enumerate(self.transfer_groups)
            for layer in group.layer_names
        }

    @property
    def prefix_cacheable_group_ids(self) -> tuple[int, ...]:
        """IDs of the transferred groups whose blocks can be stored under a prefix hash."""
        return tuple(
            i
            for i in self.transfer_group_ids
            if self.kv_cache_groups[i].kv_cache_spec.prefix_cacheable
        )

    @property
    def prefix_cacheable_groups(self) -> tuple[KVCacheGroupSpec, ...]:
        """The transferred groups whose blocks can be stored under a prefix hash."""
        return tuple(self.kv_cache_groups[i] for i in self.prefix_cacheable_group_ids)

    @property
    def host_group_ids(self) -> tuple[int, ...]:
        """IDs of the groups in host memory."""
        return tuple(i for i, g in enumerate(self.kv_cache_groups) if g.host_resident)

    def select_transfer_block_ids(self, block_ids: Sequence[_BlockIds]) -> tuple[_BlockIds, ...]:
        """Of one entry per group, those of the transferred groups.

        Raises:
            InputError: the number of entries is not that of the groups.
        """
        if len(block_ids) != len(self.kv_cache_groups):
            raise InputError(
                f"block_ids has {len(block_ids)} entries, expected {len(self.kv_cache_groups)}, "
                "one per KV cache group; pass the block IDs of every group"
            )
        return tuple(block_ids[i] for i in self.transfer_group_ids)

    def num_blocks_of(self, tensor: KVCacheTensor) -> int:
        """Block IDs of the pool behind ``tensor``.

        Raises:
            InputError: the tensor is in host memory and no host pool is configured.
        """
        if not tensor.host_resident:
            return self.num_blocks
        if self.hisparse_host_num_blocks is None:
            raise InputError(
                f"hisparse_host_num_blocks is None, expected the blocks of the host pool of "
                f"layers {', '.join(tensor.layers)}; set it or make the tensor device resident"
            )
        return self.hisparse_host_num_blocks

    @property
    def has_mamba_layers(self) -> bool:
        """Whether any layer keeps a recurrent state."""
        return any(
            isinstance(spec, MambaSpec)
            for group in self.kv_cache_groups
            for spec in iter_layer_specs(group.kv_cache_spec)
        )

    @property
    def has_mixed_precision_kv_cache(self) -> bool:
        """Whether attention caches on the device differ in dtype or quantisation."""
        precisions: set[tuple[DType, KVQuantMode]] = {
            (spec.dtype, spec.kv_quant_mode)
            for group in self.kv_cache_groups
            if not group.host_resident
            for spec in iter_layer_specs(group.kv_cache_spec)
            if isinstance(spec, AttentionSpec)
        }
        return len(precisions) > 1

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Whether a block must be zeroed before it is used again.

        A recurrent state is read before it is fully written, and bytes of another precision may
        decode to NaN.
        """
        return self.has_mamba_layers or self.has_mixed_precision_kv_cache


def group_kernel_blocks(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """View a layer's cache by manager blocks instead of kernel blocks; nothing is copied.

    Args:
        cache: [num_blocks * ratio, ...], kernel blocks first.
        num_blocks: manager blocks.

    Returns:
        [num_blocks, ratio, ...]; ``cache`` itself where the ratio is 1.

    Raises:
        ShapeError: the kernel blocks do not divide evenly among the manager blocks.
    """
    if cache.shape[0] == num_blocks:
        return cache
    if num_blocks < 1 or cache.shape[0] % num_blocks:
        raise ShapeError(
            f"cache has {cache.shape[0]} kernel blocks, expected a multiple of num_blocks "
            f"({num_blocks}); pass the cache and the blocks of one group"
        )
    return cache.view(num_blocks, cache.shape[0] // num_blocks, *cache.shape[1:])
