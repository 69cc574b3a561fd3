"""The doctor on the question of all: whether the model fits these cards, planned as `rocline serve` plans it."""

from __future__ import annotations

from rocline.engine.config import ModelConfig
from rocline.pipeline.options import Options
from rocline.pipeline.placement import PlacementError
from rocline.pipeline.plan import Request, counted, make_plan
from rocline.tools.doctor_checks import Cards, Check, gib
from rocline.tools.plan import plan_report


def plan(found: Cards, config: ModelConfig, what: str) -> Check:
    """`what`: the model, in words. values["plan"] is what `rocline plan --json` prints."""
    it = Check("plan")
    if not found.cards:
        it.not_applicable("no card; `rocline plan --release` plans for cards that you name")
        return it
    request = serving_request(found, config)
    it.values |= {"model": what, "devices": request.n_devices, "device_bytes": request.device_bytes}
    on = f"{what} on {counted(request.n_devices, 'card')} with {gib(request.device_bytes)} free"
    try:
        made = make_plan(config, request)
    except PlacementError as error:
        why, has_advice, advice = str(error).rpartition("; ")
        it.problem(f"{on}: {why if has_advice else error}", advice if has_advice else "see rocline plan --help")
        return it
    it.values["plan"] = plan_report(made)
    least = min(memory.headroom for memory in made.memory)
    it.ok(
        f"{on} fits, with {gib(least)} of headroom on the fullest; context {request.context:,}, "
        f"{request.kv_tokens:,} tokens of all requests, chunks of {request.chunk_rows:,}"
    )
    return it


def serving_request(found: Cards, config: ModelConfig) -> Request:
    """What `rocline serve --device hip` asks for when no setting says otherwise."""
    options, context = Options(device="hip"), config.text_config.max_position_embeddings
    n_stages = min(options.stages, config.text_config.num_hidden_layers)
    n_devices = min(n_stages, len(found.cards))
    return Request(
        n_devices=n_devices,
        device_bytes=min(card.free_bytes for card in found.cards[:n_devices]),
        n_stages=n_stages,
        kind=options.placement,
        context=context,
        kv_tokens=2 * context,
        chunk_rows=options.chunk_rows,
        drafts="off",
    )
