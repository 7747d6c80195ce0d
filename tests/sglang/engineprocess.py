"""The child of `engine.Engine`, which has the SGLang engine."""

from __future__ import annotations

import os
import signal
from typing import Any

from tests.enginecommands import Answer, main


class Served:
    """The engine and what may be asked of it: the public methods, by name and keyword arguments."""

    def __init__(self, options: dict[str, Any]) -> None:
        import sglang

        self._engine = sglang.Engine(**options)

    def generate(self, prompts: list[list[int]], max_tokens: int, together: bool = False) -> Answer:
        """To their ends."""
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        if together:
            found = self._engine.generate(input_ids=prompts, sampling_params=[sampling] * len(prompts))
        else:
            found = [self._engine.generate(input_ids=prompt, sampling_params=sampling) for prompt in prompts]
        return {"requests": [_request(one) for one in found]}

    def flush(self) -> Answer:
        """Empty SGLang's own levels of cache."""
        return {"success": self._engine.flush_cache().success}

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
        recv = self._engine.loop.run_until_complete(self._update(model, flush))
        return {"success": bool(recv[0]), "message": str(recv[1])}

    async def _update(self, model: str, flush: bool) -> Any:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        request = UpdateWeightFromDiskReqInput(model_path=model, flush_cache=flush)
        return await self._engine.tokenizer_manager.update_weights_from_disk(request, None)

    def _managed(self, method: str, *arguments: Any) -> Answer:
        manager = self._engine.tokenizer_manager
        done = self._engine.loop.run_until_complete(getattr(manager, method)(*arguments))
        return {"success": done.success, "message": getattr(done, "message", "")}

    def shutdown(self) -> None:
        """Give back what engine and storage hold: its processes end when they are told to, or are killed."""
        for pid in self._engine.get_all_child_pids():
            os.kill(pid, signal.SIGKILL)


def _request(found: dict[str, Any]) -> Answer:
    said = found["meta_info"]
    details = said.get("cached_tokens_details") or {}
    return {
        "tokens": list(found["output_ids"]),
        "cached": said.get("cached_tokens") or 0,
        "stored": details.get("storage") or 0,
        "reason": (said.get("finish_reason") or {}).get("type", ""),
    }


if __name__ == "__main__":
    main(Served)
