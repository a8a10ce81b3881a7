"""``--plot``: from plans to one picture file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from k3backend.cli.deployment_plans import PlanInput
from k3backend.common.kv_plan import KvPlan


def checked_path(text: str | None) -> Path | None:
    """Where the picture goes, None where none is asked for. Raises InputError before any work."""
    if text is None:
        return None
    from k3backend.report.pictures import check_picture_path

    return check_picture_path(text)


def plot_plans(path: Path, planned: Sequence[tuple[PlanInput, KvPlan]]) -> None:
    """Write one picture with a row per plan; equal plans share a row.

    Raises:
        OSError: the file cannot be written.
    """
    from k3backend.common.group_policy import candidate_groups, choose_grouping
    from k3backend.report.pictures import PlanPicture, context_curves, write_picture

    rows: list[tuple[list[str], PlanInput, KvPlan]] = []
    for source, plan in planned:
        same = next((row for row in rows if row[2].group_specs == plan.group_specs), None)
        if same is None:
            rows.append(([source.name], source, plan))
        else:
            same[0].append(source.name)
    pictures = []
    for names, source, plan in rows:
        groupings = candidate_groups(source.specs, source.context, source.stages)
        best = choose_grouping(source.specs, source.context, "k3", source.stages)
        chosen = next((c.name for c in best.candidates if c.chosen), "")
        also = [chosen]
        if plan.policy != "k3":
            groupings[plan.policy] = list(plan.group_specs)
            chosen = plan.policy
        curves = context_curves(groupings, chosen, source.context, also, source.stages)
        title = f"{' = '.join(names)}, policy {plan.policy}"
        pictures.append(PlanPicture(title, plan, source.specs, curves))
    write_picture(path, pictures)
