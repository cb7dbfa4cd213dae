"""The table that the demonstration prints."""

from collections.abc import Sequence

from tabulate import tabulate

from pdp_fx.demo.summary import LATENCY_BATCH, Summary

NOTE = f"""\
Accuracy: on the test images, mean of all seeds (lowest to highest). Max diff: converted against prepared in
eval mode, as a share of the largest output, worst seed. All else: the first seed's model.
Latency: one thread, {LATENCY_BATCH} images, medians of runs that take turns. The dense net keeps its batch
norms, the others have them folded, which alone saves some time. Stored zeros make no model faster, and a
file smaller only once it is compressed; removed channels do both."""


def table(summaries: Sequence[Summary]) -> str:
    """Return one row a variant, and what there is to know about the columns."""
    rows = [_cells(summary) for summary in summaries]
    return (
        tabulate(rows, headers="keys", disable_numparse=True, colalign=["left"] + ["right"] * 10)
        + "\n"
        + NOTE
    )


def _cells(summary: Summary) -> dict[str, str]:
    accuracy = [100 * share for share in summary.accuracy]
    mean = sum(accuracy) / len(accuracy)
    return {
        "variant": summary.variant,
        "test accuracy %": f"{mean:.1f} ({min(accuracy):.1f} to {max(accuracy):.1f})",
        "asked": summary.asked,
        "reached %": "-" if summary.reached is None else f"{100 * summary.reached:.2f}",
        "params": f"{summary.parameters:,}",
        "not zero": f"{summary.nonzero:,}",
        "MACs": f"{summary.macs:,}",
        "kB on disk": f"{summary.size.plain / 1000:,.0f}",
        "compressed": f"{summary.size.compressed / 1000:,.0f}",
        "latency": f"{summary.latency:.2f}x",
        "max diff": "-" if summary.difference is None else f"{summary.difference:.0e}",
    }
