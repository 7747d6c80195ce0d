"""The child of `engine.Engine`, which has the SGLang engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Iterable
from typing import Any

from tests.enginecommands import Answer, main


class ServedSglang:
    """The engine and what may be asked of it: the public methods, by name and keyword arguments."""

    def __init__(self, options: dict[str, Any]) -> None:
        import sglang

        self._engine = sglang.Engine(**options)
        self._started: dict[str, asyncio.Task[Any]] = {}

    def generate(self, prompts: list[list[int]], max_tokens: int, together: bool = False) -> Answer:
        """Generates to the ends of the prompts. One that is alone may fail: its reason explains how."""
        sampling = _sampling(max_tokens)
        if together:
            found = self._engine.generate(input_ids=prompts, sampling_params=[sampling] * len(prompts))
            return {"requests": [_request(one) for one in found]}
        return {"requests": [self._generate_one(prompt, sampling) for prompt in prompts]}

    def _generate_one(self, prompt: list[int], sampling: dict[str, Any]) -> Answer:
        try:
            return _request(self._engine.generate(input_ids=prompt, sampling_params=sampling))
        except Exception as error:  # noqa: BLE001  SGLang raises what a server would answer
            return {"tokens": [], "cached": 0, "stored": 0, "reason": repr(error)}

    def ask(self, prompts: list[list[int]], max_tokens: int, **fields: Any) -> Answer:
        """Does what `generate` does, with any other fields of SGLang's requests."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        async def one(prompt: list[int]) -> Any:
            asked = GenerateReqInput(input_ids=prompt, sampling_params=_sampling(max_tokens), **fields)
            return await self._engine.tokenizer_manager.generate_request(asked, None).__anext__()

        return {"requests": [_request(self._run(one(prompt))) for prompt in prompts]}

    def adapter_id(self, name: str) -> Answer:
        """SGLang's id of an adapter."""
        return {"id": self._engine.tokenizer_manager.lora_registry._registry[name].lora_id}

    def load_adapter(self, name: str, path: str) -> Answer:
        """Take an adapter, while requests are served."""
        done = self._engine.load_lora_adapter(name, path)
        return {"success": done.success, "message": done.error_message or ""}

    def unload_adapter(self, name: str) -> Answer:
        """Give it back."""
        done = self._engine.unload_lora_adapter(name)
        return {"success": done.success, "message": done.error_message or ""}

    def give_up(self, prompts: list[list[int]], max_tokens: int, after_s: float) -> Answer:
        """Ask for all at once, and think better of it after a while."""
        self._run(self._give_up(prompts, _sampling(max_tokens), after_s))
        return {}

    async def _give_up(self, prompts: list[list[int]], sampling: dict[str, Any], after_s: float) -> None:
        asked = [self._engine.async_generate(input_ids=prompt, sampling_params=sampling) for prompt in prompts]
        tasks = [asyncio.ensure_future(one) for one in asked]
        await asyncio.sleep(after_s)
        self._engine.tokenizer_manager.abort_request(abort_all=True)
        await asyncio.gather(*tasks, return_exceptions=True)

    def start(self, prompts: list[list[int]], names: list[str], max_tokens: int) -> Answer:
        """Have the scheduler begin with them, by names that `abort` and `end` take."""
        self._run(self._start(prompts, names, max_tokens))
        return {}

    def abort(self, name: str) -> Answer:
        """Give one of them up: what became of it, as soon as the scheduler has answered."""
        self._engine.tokenizer_manager.abort_request(name)
        return self.end([name])

    def end(self, names: list[str]) -> Answer:
        """What became of them, at their ends."""
        found = self._run(_all(self._started.pop(name) for name in names))
        return {"requests": [_request(one) for one in found]}

    async def _start(self, prompts: list[list[int]], names: list[str], max_tokens: int) -> None:
        states = self._engine.tokenizer_manager.rid_to_state
        for name, prompt in zip(names, prompts, strict=True):
            asked = self._engine.async_generate(input_ids=prompt, sampling_params=_sampling(max_tokens), rid=name)
            self._started[name] = asyncio.ensure_future(asked)
            while not (self._started[name].done() or (name in states and states[name].dispatched)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def flush(self, patience_s: float = 0.0) -> Answer:
        """Empty SGLang's own levels of cache, once it is idle."""
        return {"success": self._run(self._engine.tokenizer_manager.flush_cache(timeout_s=patience_s)).success}

    def clear(self) -> Answer:
        """Empty the storage."""
        return self._managed("clear_hicache_storage")

    def detach(self) -> Answer:
        """Go on without storage."""
        return self._managed("detach_hicache_storage")

    def attach(self, config: str) -> Answer:
        """Go on with a storage of that `extra_config`."""
        return self._managed("attach_hicache_storage", "dynamic", config)

    def update_weights(self, model: str, flush: bool) -> Answer:
        """Take another model's weights, in place."""
        recv = self._run(self._update(model, flush))
        return {"success": bool(recv[0]), "message": str(recv[1])}

    async def _update(self, model: str, flush: bool) -> Any:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        request = UpdateWeightFromDiskReqInput(model_path=model, flush_cache=flush)
        return await self._engine.tokenizer_manager.update_weights_from_disk(request, None)

    def _managed(self, method: str, *arguments: Any) -> Answer:
        done = self._run(getattr(self._engine.tokenizer_manager, method)(*arguments))
        return {"success": done.success, "message": getattr(done, "message", "")}

    def _run(self, awaited: Awaitable[Any]) -> Any:
        return self._engine.loop.run_until_complete(awaited)

    def shutdown(self) -> None:
        """Give back what engine and storage hold: kill the engine's processes, which might not end on request."""
        for pid in self._engine.get_all_child_pids():
            os.kill(pid, signal.SIGKILL)


def _sampling(max_tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}


async def _all(awaited: Iterable[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*awaited)


def _request(found: dict[str, Any]) -> Answer:
    meta = found["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return {
        "tokens": list(found["output_ids"]),
        "cached": meta.get("cached_tokens") or 0,
        "stored": details.get("storage") or 0,
        "reason": (meta.get("finish_reason") or {}).get("type", ""),
    }


if __name__ == "__main__":
    main(ServedSglang)
