"""Where the groups of one dimension sit on a machine, by arithmetic on their lattice, never over all ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import lcm

import numpy as np

from simpar.topology.lattice import Axes, Axis, IntArray, base_of, count, is_uniform, per_window, points, residues, span
from simpar.topology.levels import Levels
from simpar.topology.placement import GroupPlacement, Tier

TIERS: tuple[Tier, ...] = ("device", "node", "domain", "leaf", "pod", "core")

Kinds = tuple[tuple[GroupPlacement, int], ...]
"""Distinct placements with how many groups have each, the slowest first."""


@lru_cache(maxsize=2048)
def place_groups(axes: Axes, others: Axes, world: int, levels: Levels) -> Kinds:
    """Placements of all translates of a merged lattice.

    Args:
        axes: the group (`lattice.merged`).
        others: the axes that tell its groups apart; the groups' bases are the points of this lattice.
        world: ranks in all.
        levels: the machine's tiers.
    """
    total = count(others)
    if not axes:
        return ((GroupPlacement(1, (1,), (1,), "device", min(levels.node, world)), total),)
    uneven = [unit for unit in set(levels.sizes) if unit < world and not is_uniform(axes, unit)]
    if not uneven:
        return ((_placement(axes, 0, world, levels), total),)
    found: dict[GroupPlacement, int] = {}
    # Which siblings share a node depends on where between the members of one group its base lies, unless the node holds
    # one member of as many groups as it has GPUs.
    scattered = len(axes) == 1 and axes[0].stride >= levels.node
    period = 1 if scattered or levels.node not in uneven else axes[-1].stride
    for base, amount in _distinct_bases(axes, others, levels, uneven, period):
        placement = _placement(axes, base, world, levels)
        found[placement] = found.get(placement, 0) + amount
    return _slowest_first(found)


@lru_cache(maxsize=2048)
def place_neighbours(axes: Axes, others: Axes, world: int, levels: Levels) -> Kinds:
    """Placements of consecutive members, and of the last with the first, of every translate of a merged lattice.

    A pair's `concurrent_groups` is that of the whole group: in a pipeline or a ring all siblings send at the same time.
    """
    if not axes:
        return ()
    concurrent = place_groups(axes, others, world, levels)[0][0].concurrent_groups
    pairs = []
    for k, axis in enumerate(axes):  # a step along axis k goes back to the start of the axes inside it
        reach = span(axes[:k])
        bases = (*others, Axis(axis.size - 1, axis.stride), *axes[k + 1 :])
        pairs.append((Axis(2, axis.stride - reach), bases, reach))
    if count(axes) > 2:
        pairs.append((Axis(2, span(axes)), others, 0))
    found: dict[GroupPlacement, int] = {}
    for pair, bases, offset in pairs:
        for placement, amount in _place_pair(pair, bases, offset, world, levels, concurrent):
            found[placement] = found.get(placement, 0) + amount
    return _slowest_first(found)


@lru_cache(maxsize=2048)
def place_pairs(axes: Axes, others: Axes, world: int, levels: Levels) -> tuple[GroupPlacement, ...]:
    """The slowest placement, over the translates of a merged lattice, of each pair of consecutive members, the last with the first
    at the end. `place_neighbours` counts the same pairs."""
    concurrent = place_groups(axes, others, world, levels)[0][0].concurrent_groups
    members, period = points(axes).tolist(), lcm(*levels.sizes)
    known: dict[tuple[int, int], GroupPlacement] = {}
    found = []
    for low, high in [*pairwise(members), (members[0], members[-1])]:
        key = (high - low, low % period)
        if key not in known:
            kinds = _place_pair(Axis(2, high - low), others, low, world, levels, concurrent)
            known[key] = _slowest_first(dict(kinds))[0][0]
        found.append(known[key])
    return tuple(found)


def _place_pair(pair: Axis, bases: Axes, offset: int, world: int, levels: Levels, concurrent: int) -> Kinds:
    """The placements of two members from all `bases`, as siblings of a group of which so many share a node."""
    found: dict[GroupPlacement, int] = {}
    uneven = [unit for unit in set(levels.sizes) if unit < world and pair.stride % unit]
    for base, amount in _distinct_bases((pair,), bases, levels, uneven, 1, offset):
        placement = _placement((pair,), base, world, levels)
        aligned = placement.num_nodes == 1 or pair.stride % levels.node == 0
        placement = replace(placement, concurrent_groups=concurrent, same_rail=aligned)
        found[placement] = found.get(placement, 0) + amount
    return tuple(found.items())


def _slowest_first(found: dict[GroupPlacement, int]) -> Kinds:
    return tuple(sorted(found.items(), key=lambda item: _slowness(item[0]), reverse=True))


def _distinct_bases(
    axes: Axes, others: Axes, levels: Levels, uneven: list[int], period: int, offset: int = 0
) -> list[tuple[int, int]]:
    """One base for each way of meeting the `uneven` units, with how many bases meet them so."""
    bases, weights = residues(others, lcm(period, *uneven), offset)
    key = _kind_key(axes, bases, levels, uneven) * period + bases % period
    _, first, where = np.unique(key, return_index=True, return_inverse=True)
    amounts = np.bincount(where.ravel(), weights=weights).astype(np.int64)
    return list(zip(bases[first].tolist(), amounts.tolist(), strict=True))


def _slowness(placement: GroupPlacement) -> tuple[int, int, int, int, int]:
    """Orders placements of equal size by what makes a collective slow."""
    return (
        TIERS.index(placement.tier),
        placement.num_domains,
        placement.num_nodes,
        -min(placement.ranks_per_domain),
        placement.concurrent_groups,
    )


def _kind_key(axes: Axes, bases: IntArray, levels: Levels, uneven: list[int]) -> IntArray:
    """Equal keys for bases whose groups are placed alike, int array [bases]."""
    reach = span(axes)
    key = np.zeros(len(bases), dtype=np.int64)
    for unit in (levels.node, levels.domain):
        if unit in uneven:
            key = key * unit + bases % unit
    for unit in levels.sizes:
        # The tier is what is crossed; for a unit that divides no period every group crosses or none does.
        crossed = bases // unit != (bases + reach) // unit if unit in uneven else np.zeros(len(bases), dtype=bool)
        key = key * 2 + crossed
    return key


def _placement(axes: Axes, base: int, world: int, levels: Levels) -> GroupPlacement:
    """The placement of the group whose lowest rank is `base`."""
    per_node = per_window(axes, base, levels.node)
    per_domain = per_node if levels.domain == levels.node else per_window(axes, base, levels.domain)
    tier = levels.tier(base, base + span(axes))
    if is_uniform(axes, levels.node) or levels.node >= world:
        concurrent, same_rail = max(1, min(levels.node, world) // per_node[0]), True
    else:
        concurrent, same_rail = _concurrent(axes, base, world, levels.node), _same_rail(axes, base, levels.node)
    return GroupPlacement(
        size=count(axes),
        ranks_per_domain=per_domain,
        ranks_per_node=per_node,
        tier=tier,
        concurrent_groups=concurrent,
        oversubscription=levels.oversubscription(tier),
        stride=axes[0].stride,
        same_rail=same_rail,
    )


def _concurrent(axes: Axes, base: int, world: int, node: int) -> int:
    """The most groups that any node of this group holds members of.

    Shifting a window by the outermost stride maps groups onto groups, so one window of each residue and
    the two ends are enough.
    """
    windows = np.unique(points(axes, base) // node)
    _, first = np.unique(windows * node % axes[-1].stride, return_index=True)
    chosen = np.unique(np.concatenate([windows[first], windows[:1], windows[-1:]]))
    ranks = chosen[:, None] * node + np.arange(node)
    bases = np.sort(np.where(ranks < world, base_of(ranks, axes), -1), axis=1)
    changes = (np.diff(bases, axis=1) != 0) & (bases[:, 1:] >= 0)
    return int((changes.sum(axis=1) + (bases[:, 0] >= 0)).max())


def _same_rail(axes: Axes, base: int, node: int) -> bool:
    """Whether the group has the same local indices in every node it touches."""
    members = points(axes, base)
    _, sizes = np.unique(members // node, return_counts=True)
    if len(sizes) == 1:
        return True
    if sizes.min() != sizes.max():
        return False
    local = (members % node).reshape(len(sizes), -1)
    return bool((local == local[0]).all())
