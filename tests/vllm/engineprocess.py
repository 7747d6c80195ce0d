"""The child of `engine.Engine`, which has the vLLM engine."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

from tests.enginecommands import Answer, main


class ServedVllm:
    """The engine and what may be asked of it: the public methods, by name and keyword arguments."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        connector = options.pop("connector")
        if touched := options.pop("touched", None):
            _touch_while_loading(touched)
        if connector is not None:
            options["kv_transfer_config"] = KVTransferConfig(**connector)
        self._llm = LLM(**options)
        self._asked = 0

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        salt: str | None = None,
        params: dict[str, Any] | None = None,
        adapter: dict[str, Any] | None = None,
        load_after: int | None = None,
        hints: list[dict[str, Any]] | None = None,
    ) -> Answer:
        """Runs all prompts at once, to their ends. `params`: `kv_transfer_params`; `adapter`: a LoRARequest as a map,
        which is loaded in place after `load_after` steps; `hints`: actions of a KvHintsEnvelope, as maps.
        """
        names = self._add(prompts, max_tokens, salt, params, adapter, hints)
        if adapter is not None and load_after is not None:
            from vllm.lora.request import LoRARequest

            self._collect(names, steps=load_after)
            self._llm.llm_engine.add_lora(LoRARequest(**adapter, load_inplace=True))
        return {"requests": self._collect(names)}

    def abort(self, prompts: list[list[int]], max_tokens: int, after_steps: int) -> Answer:
        """Does what `generate` does, but aborts every second request after `after_steps` steps."""
        names = self._add(prompts, max_tokens, None)
        begun = self._collect(names, steps=after_steps)
        left = [name for name, request in zip(names, begun, strict=True) if not request["reason"]]
        self._llm.llm_engine.abort_request(left[1::2])
        kept = [name for name in left if name not in left[1::2]]
        ended = dict(zip(kept, self._collect(kept), strict=True))
        return {"requests": [ended.get(name, request) for name, request in zip(names, begun, strict=True)]}

    def reset(self, connector: bool) -> Answer:
        """Forget what the engine holds and, `connector`, what the connector does, as after an update of weights."""
        return {"done": self._llm.reset_prefix_cache(reset_connector=connector)}

    def metrics(self) -> Answer:
        """Counters by name without labels, summed; of those with sources also each, by "name/source"."""
        sums: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                source = metric.labels.get("source")
                for name in (metric.name, *([f"{metric.name}/{source}"] if source else [])):
                    sums[name] = sums.get(name, 0) + value
        return sums

    def await_transfers(self) -> Answer:
        """Waits until each rank has heard the end of all that it was asked to store and load."""
        self._llm.collective_rpc(_await_transfers)
        return {}

    def kill_before_load(self, pid: int) -> Answer:
        """SIGKILL a process when the next load has been promised and is about to be asked for."""
        from kvoffloadd.integrations.vllm.worker import KVOffloaddWorker

        submit = KVOffloaddWorker.submit_load

        def kill(*arguments: Any, **named: Any) -> bool:
            KVOffloaddWorker.submit_load = submit  # type: ignore[method-assign]
            os.kill(pid, signal.SIGKILL)
            return submit(*arguments, **named)

        KVOffloaddWorker.submit_load = kill  # type: ignore[method-assign]
        return {}

    def damage_loads(self, pid: int, which: str) -> Answer:
        """Makes the first load of each prompt from now on find one of its keys damaged in the memory of that daemon."""
        from kvoffloadd.integrations.vllm.worker import KVOffloaddWorker
        from tests.vllm.damage import CHOICES, damaging

        submit = damaging(KVOffloaddWorker.submit_load, pid, CHOICES[which])
        KVOffloaddWorker.submit_load = submit  # type: ignore[method-assign]
        return {}

    def shutdown(self) -> None:
        """Give back what engine and connector hold."""
        self._llm.llm_engine.engine_core.shutdown()

    def _add(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        salt: str | None,
        params: dict[str, Any] | None = None,
        adapter: dict[str, Any] | None = None,
        hints: list[dict[str, Any]] | None = None,
    ) -> list[str]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

        lora = None if adapter is None else LoRARequest(**adapter)
        actions = None if hints is None else [KvHintAction(**action) for action in hints]
        envelope = None if actions is None else KvHintsEnvelope("0.1", "m", actions)

        extra = None if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )
        names = []
        for prompt in prompts:
            self._asked += 1
            names.append(f"r{self._asked}")
            given: dict[str, Any] = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
            self._llm.llm_engine.add_request(names[-1], given, sampling, lora_request=lora, kv_hints=envelope)
        return names

    def _collect(self, names: list[str], steps: int | None = None) -> list[Answer]:
        """Step until all have ended, or so often. The parent sees to the deadline: an engine of several processes steps
        as fast as it can while it waits.
        """
        found = {name: _request((), None, "") for name in names}
        for _ in itertools.count() if steps is None else range(steps):
            if not self._llm.llm_engine.has_unfinished_requests():
                break
            for output in self._llm.llm_engine.step():
                completion = output.outputs[0]
                cached = output.num_cached_tokens
                found[output.request_id] = _request(completion.token_ids, cached, completion.finish_reason or "")
        return [found[name] for name in names]


def _touch_while_loading(file: str) -> None:
    """Arranges that a file of the model is written to while its weights are being loaded."""
    from vllm.model_executor.model_loader import DefaultModelLoader

    load = DefaultModelLoader.load_weights

    def load_weights(*arguments: Any, **named: Any) -> Any:
        os.utime(file)
        return load(*arguments, **named)

    DefaultModelLoader.load_weights = load_weights


def _await_transfers(_worker: Any) -> None:
    """Runs in each rank's process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group = get_kv_transfer_group()
    (ours,) = (one for one in getattr(group, "sub_connectors", [group]) if hasattr(one, "connector_worker"))
    transfers = ours.connector_worker.worker._transfer_thread
    transfers.wait(set(transfers._open))


def _request(tokens: Any, cached: int | None, reason: str) -> Answer:
    return {"tokens": list(tokens), "cached": cached, "reason": reason}


if __name__ == "__main__":
    main(ServedVllm)
