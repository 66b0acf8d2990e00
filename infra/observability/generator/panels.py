"""How a dashboard of ours looks: a few kinds of panels, with Grafana's foundation SDK beneath.

Series that every pod says the same of are a `max` over pods, counters a `rate` of each process and then a sum: so a
process that dies takes nothing back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH = 24
HEIGHT = 8


AnyPanel = timeseries.Panel | stat.Panel


class Query(NamedTuple):
    """PromQL, and what a series of it is called: text with `{{label}}`."""

    expr: str
    legend: str = ""


def board(uid: str, title: str, description: str) -> dashboard.Dashboard:
    """A dashboard without panels; which Prometheus it asks is chosen in it."""
    source = dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["headrace"])
        .readonly()
        .refresh("10s")
        .time("now-30m", "now")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(source)
        .link(
            dashboard.DashboardLink("headrace")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["headrace"])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
    )


def model_variable() -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable("model")
        .label("model")
        .datasource(SOURCE)
        .query("label_values(headrace_slo_target_seconds, model)")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


def graph(
    title: str, description: str, unit: str, *queries: Query, span: int = 8, is_stacked: bool = False
) -> timeseries.Panel:
    """Lines over time; `unit` is Grafana's word for one, `short` for plain numbers."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .span(span)
        .height(HEIGHT)
        .fill_opacity(30 if is_stacked else 8)
        .line_width(1)
        .show_points(kinds.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(kinds.LegendDisplayMode.LIST)
            .placement(kinds.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING))
    )
    if is_stacked:
        panel = panel.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL))
    for place, query in enumerate(queries):
        panel = panel.with_target(_target(query, "ABCDEFGH"[place]))
    return panel


def number(
    title: str, description: str, unit: str, query: Query, *, warn: float | None = None, bad: float | None = None
) -> stat.Panel:
    """One number now, green up to `warn`, red from `bad` on; where less is worse, `bad` is below `warn`."""
    steps = [models.Threshold(value=None, color="green")]
    if warn is not None and bad is not None and bad < warn:
        steps = [models.Threshold(None, "red"), models.Threshold(bad, "orange"), models.Threshold(warn, "green")]
    elif warn is not None and bad is not None:
        steps += [models.Threshold(warn, "orange"), models.Threshold(bad, "red")]
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .span(4)
        .height(4)
        .thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        .color_mode(kinds.BigValueColorMode.VALUE)
        .graph_mode(kinds.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_target(query, "A"))
    )


def filled(made: dashboard.Dashboard, rows: Mapping[str, Sequence[AnyPanel]]) -> models.Dashboard:
    """A dashboard with these panels, row by row by their titles; a row without one has no head."""
    for title, panels in rows.items():
        if title:
            made = made.with_row(dashboard.Row(title))
        for panel in panels:
            made = made.with_panel(panel)
    return made.build()


def quantiles(metric: str, by: str = "", where: str = "", legend: str = "") -> list[Query]:
    """Median, 95th and 99th percentile of a histogram over all processes."""
    labels = f"le, {by}" if by else "le"
    buckets = f"sum by ({labels}) (rate({metric}_bucket{where}[$__rate_interval]))"
    return [
        Query(f"histogram_quantile({q}, {buckets})", f"p{round(100 * q)} {legend}".strip()) for q in (0.5, 0.95, 0.99)
    ]


def rate(metric: str, by: str, where: str = "") -> str:
    """A counter's growth a second over all processes."""
    return f"sum by ({by}) (rate({metric}{where}[$__rate_interval]))"


def as_json(made: models.Dashboard) -> str:
    text: str = JSONEncoder(sort_keys=True, indent=2).encode(made)
    return text + "\n"


def _target(query: Query, ref_id: str) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .ref_id(ref_id)
        .expr(query.expr)
        .legend_format(query.legend or "__auto")
        .datasource(SOURCE)
    )
