"""Pictures of a plan: one pool block with its groups side by side, and bytes against context.

matplotlib draws them; it is the extra ``plot`` and loads only here, when a picture is asked for.
"""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3backend.common.block_forms import real_page_bytes
from k3backend.common.errors import InputError
from k3backend.common.kv_capacity import plan_stages
from k3backend.common.kv_config import layer_spec_runs, request_blocks
from k3backend.common.kv_spec import KVCacheGroupSpec, KVCacheSpec
from k3backend.common.plan_context import PlanContext

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from k3backend.common.kv_plan import KvPlan

SUFFIXES = (".png", ".svg", ".html")
MAX_CURVES = 5
POINTS = 160
SHORTEST_TOKENS = 256

# Okabe and Ito's colours, which colour-blind readers tell apart.
TARGET_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#F0E442")
DRAFT_COLOUR = "#D55E00"
PADDING_COLOUR = "#E3C9A8"
IDLE_COLOUR = "#F2F2F2"
CURVE_COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9")


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes of one request under one grouping.

    Attributes:
        name: the candidate's name.
        groups: number of groups.
        tokens, request_bytes: lengths, and the pool bytes at each.
        chosen: whether the plan uses it.
    """

    name: str
    groups: int
    tokens: tuple[int, ...]
    request_bytes: tuple[int, ...]
    chosen: bool


@dataclass(frozen=True, slots=True)
class PlanPicture:
    """What one row of a picture shows.

    Attributes:
        title: a line above it.
        plan: the plan.
        specs: spec per layer as the model declares it; says which layers are the draft's.
        curves: bytes against context.
    """

    title: str
    plan: KvPlan
    specs: Mapping[str, KVCacheSpec]
    curves: tuple[Curve, ...]


def check_picture_path(path: str) -> Path:
    """The path as one that a picture can be written to.

    Raises:
        InputError: another suffix, a missing folder, or matplotlib is not installed.
    """
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise InputError(
            f"argument --plot: {path!r} does not end in {', '.join(SUFFIXES)}; give such a name"
        )
    if not target.parent.is_dir():
        raise InputError(
            f"argument --plot: folder {str(target.parent)!r} does not exist; make it first"
        )
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"argument --plot: matplotlib cannot be imported ({error}); install k3backend[plot]"
        ) from error
    return target


def context_curves(
    groupings: Mapping[str, Sequence[KVCacheGroupSpec]],
    chosen: str,
    context: PlanContext,
    also: Sequence[str] = (),
    stages: Mapping[str, int] | None = None,
) -> tuple[Curve, ...]:
    """Bytes of one request under the groupings, from short requests to the longest.

    Args:
        groupings: groups by name.
        chosen: the name of the one that the plan uses; it comes first.
        also: names to show in any case.
        stages: pipeline stage per layer; the widest stage's pool block counts.
    Returns:
        The chosen one, vLLM's default and the plain rule where there are any, then those that are
        cheapest somewhere; ``MAX_CURVES`` at most.
    """
    tokens = _lengths(context.max_model_len)
    curves = {}
    for name, groups in groupings.items():
        cut = plan_stages(groups, context, stages)
        block_bytes = max((stage.block_bytes for stage in cut), default=0)
        needed = tuple(block_bytes * sum(request_blocks(groups, context, at)) for at in tokens)
        curves[name] = Curve(name, len(groups), tokens, needed, name == chosen)
    wins = dict.fromkeys(curves, 0)
    for index in range(len(tokens)):
        wins[min(curves, key=lambda name: curves[name].request_bytes[index])] += 1
    always = [name for name in (chosen, "vllm", *also, _plain(curves)) if name in curves]
    others = sorted((n for n in curves if n not in always and wins[n]), key=lambda n: -wins[n])
    kept = list(dict.fromkeys([*always, *others]))[:MAX_CURVES]
    return tuple(curves[name] for name in kept)


def _plain(names: Mapping[str, Any]) -> str:
    return next((name for name in names if name.startswith("isolate")), "")


def _lengths(longest: int) -> tuple[int, ...]:
    """Lengths from a few hundred tokens to the longest, evenly spaced on a logarithmic scale."""
    shortest = min(SHORTEST_TOKENS, longest)
    ratio = longest / shortest
    found = {round(shortest * ratio ** (i / (POINTS - 1))) for i in range(POINTS)}
    return tuple(sorted({*found, longest}))


def crossing_tokens(left: Curve, right: Curve) -> list[int]:
    """Lengths at which the cheaper of two curves changes, first point after each change."""
    signs = [
        (a > b) - (a < b) for a, b in zip(left.request_bytes, right.request_bytes, strict=True)
    ]
    found, last = [], 0
    for tokens, sign in zip(left.tokens, signs, strict=True):
        if sign and last and sign != last:
            found.append(tokens)
        last = sign or last
    return found


def write_picture(path: Path, pictures: Sequence[PlanPicture]) -> None:
    """Draw one row per plan and write the file in the format of its suffix.

    Raises:
        OSError: the file cannot be written.
    """
    figure = draw(pictures)
    suffix = path.suffix.lower()
    if suffix == ".html":
        path.write_text(_page(figure, pictures), encoding="utf-8")
    else:
        figure.savefig(path, format=suffix[1:], dpi=160, metadata=_metadata(suffix))


def draw(pictures: Sequence[PlanPicture]) -> Figure:
    """A row per plan: the pool block, a request's bytes, and their share of the default's."""
    import matplotlib
    from matplotlib.figure import Figure as NewFigure

    # Ids in SVG files are random without this; equal plans give equal files.
    matplotlib.rcParams["svg.hashsalt"] = "k3backend"
    rows = [_row_inches(picture) for picture in pictures]
    figure = NewFigure(figsize=(18, sum(rows)), layout="constrained")
    axes = figure.subplots(
        len(pictures), 3, squeeze=False, height_ratios=rows, width_ratios=(1.5, 1, 1)
    )
    for (block, curves, shares), picture in zip(axes, pictures, strict=True):
        draw_block(block, picture)
        draw_curves(curves, picture)
        draw_shares(shares, picture)
    return figure


def _row_inches(picture: PlanPicture) -> float:
    return max(3.8, 0.30 * len(picture.plan.groups) + 1.6)


def draw_block(axes: Axes, picture: PlanPicture) -> None:
    """One pool block: a bar per group, a cell per layer, padding and idle bytes visible."""
    from matplotlib.patches import Patch

    plan = picture.plan
    mib = 1 << 20
    colours: dict[str, str] = {}
    labels = []
    for row, (group, spec) in enumerate(zip(plan.groups, plan.group_specs, strict=True)):
        left = 0.0
        for layer_spec, names in layer_spec_runs(spec):
            page = layer_spec.page_size_bytes
            real = real_page_bytes(layer_spec)
            for name in names:
                draft = picture.specs[name].is_draft
                colour = DRAFT_COLOUR
                if not draft:
                    kind = type(layer_spec).__name__
                    free = TARGET_COLOURS[len(colours) % len(TARGET_COLOURS)]
                    colour = colours.setdefault(kind, free)
                axes.barh(
                    row,
                    real / mib,
                    left=left / mib,
                    height=0.7,
                    color=colour,
                    edgecolor="white",
                    linewidth=0.4,
                    hatch="//" if draft else None,
                )
                if page > real:
                    axes.barh(
                        row,
                        (page - real) / mib,
                        left=(left + real) / mib,
                        height=0.7,
                        color=PADDING_COLOUR,
                        edgecolor="white",
                        linewidth=0.2,
                    )
                left += page
        if left < plan.block_bytes:
            axes.barh(
                row,
                (plan.block_bytes - left) / mib,
                left=left / mib,
                height=0.7,
                color=IDLE_COLOUR,
                edgecolor="#999999",
                linewidth=0.4,
            )
        labels.append(
            f"{group.id}: {group.num_layers} x {group.block_size:,} tok, "
            f"{group.blocks_per_request:,} blocks"
        )
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, plan.block_bytes / mib)
    axes.set_xlabel("MiB of one pool block")
    axes.set_title(
        f"{picture.title}\none block ID: {plan.block_bytes:,} B, {len(plan.groups)} groups",
        fontsize=10,
        loc="left",
    )
    legend = [Patch(color=colour, label=kind) for kind, colour in colours.items()]
    if any(picture.specs[name].is_draft for group in plan.groups for name in group.layer_names):
        legend.append(Patch(facecolor=DRAFT_COLOUR, hatch="//", edgecolor="white", label="draft"))
    legend.append(Patch(color=PADDING_COLOUR, label="padding of a page"))
    legend.append(Patch(facecolor=IDLE_COLOUR, edgecolor="#999999", label="idle in this group"))
    below = -0.5 / (_row_inches(picture) - 1.3)
    axes.legend(
        handles=legend, fontsize=7, loc="upper left", ncols=len(legend), bbox_to_anchor=(0, below)
    )


def draw_curves(axes: Axes, picture: PlanPicture) -> None:
    """Bytes of one request against its length."""
    gib = 1 << 30
    for index, curve in enumerate(picture.curves):
        axes.plot(
            curve.tokens,
            [size / gib for size in curve.request_bytes],
            label=f"{curve.name}: {curve.groups} groups{', chosen' if curve.chosen else ''}",
            **_stroke(index, curve),
        )
    axes.set_yscale("log")
    axes.set_ylabel("GiB of KV cache per rank")
    axes.set_title("one request under the groupings", fontsize=10, loc="left")
    axes.legend(fontsize=8)
    _token_axis(axes, picture)


def draw_shares(axes: Axes, picture: PlanPicture) -> None:
    """The same against vLLM's default (or the chosen grouping), with the length of equal bytes."""
    curves = picture.curves
    base = next((curve for curve in curves if curve.name == "vllm"), curves[0])
    for index, curve in enumerate(curves):
        shares = [
            100 * size / other if other else 100
            for size, other in zip(curve.request_bytes, base.request_bytes, strict=True)
        ]
        axes.plot(curve.tokens, shares, **_stroke(index, curve))
    axes.set_ylabel(f"% of the bytes of {base.name}")
    axes.set_title(f"compared with {base.name}", fontsize=10, loc="left")
    axes.set_ylim(top=min(axes.get_ylim()[1], 200))
    chosen = next((curve for curve in curves if curve.chosen), base)
    for tokens in crossing_tokens(chosen, base)[-1:]:
        axes.axvline(tokens, color="#555555", linewidth=0.8, linestyle=":")
        axes.annotate(
            f"{chosen.name} = {base.name}\nat {tokens:,} tokens",
            (tokens, 100),
            xytext=(-6, 24),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
    _token_axis(axes, picture)


def _stroke(index: int, curve: Curve) -> dict[str, Any]:
    return {
        "color": CURVE_COLOURS[index % len(CURVE_COLOURS)],
        "linewidth": 2.4 if curve.chosen else 1.2,
        "linestyle": "-" if curve.chosen else "--",
    }


def _token_axis(axes: Axes, picture: PlanPicture) -> None:
    tokens = picture.curves[0].tokens
    ticks = [1 << power for power in range(8, 31, 2) if tokens[0] <= 1 << power <= tokens[-1]]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])
    axes.axvline(picture.plan.context.planning_tokens, color="#BBBBBB", linewidth=0.8)
    axes.set_xlabel("tokens of the request; grey: the planning context")
    axes.grid(visible=True, which="major", linewidth=0.3)


def _short(tokens: int) -> str:
    """Tokens in binary units: 16 Ki, 1 Mi."""
    for unit, name in ((1 << 20, " Mi"), (1 << 10, " Ki")):
        if tokens >= unit:
            return f"{tokens // unit}{name}"
    return str(tokens)


def _metadata(suffix: str) -> dict[str, str | None]:
    return {"Date": None} if suffix == ".svg" else {}


def _page(figure: Figure, pictures: Sequence[PlanPicture]) -> str:
    """A page that holds the figure as SVG and the same numbers as text."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=_metadata(".svg"))
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    lines = []
    for picture in pictures:
        plan = picture.plan
        lines.append(f"<h2>{html.escape(picture.title)}</h2>")
        lines.append(f"<p>{html.escape(plan.reason)}</p>")
        lines += [
            f"<p><b>{html.escape(warning.code)}</b>: {html.escape(warning.message)}</p>"
            for warning in plan.warnings
        ]
    body = "\n".join(lines)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<title>KV cache groups</title></head>\n"
        f'<body style="font-family: sans-serif">\n{svg}\n{body}\n</body></html>\n'
    )
