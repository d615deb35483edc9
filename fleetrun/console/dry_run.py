"""The plan that `--dry_run` prints, as text or as one JSON document."""

from __future__ import annotations

import json
import shlex

from fleetrun.aliases import Document, Environ
from fleetrun.console.text import masked
from fleetrun.pod.spec import ContainerSpec, PodSpec


def plan_document(spec: PodSpec, environ: Environ, notifiers: str) -> Document:
    """Build the plan as a JSON document.

    `environ` is the launcher's environment. Each process lists only its differences. `notifiers`: the
    receivers of notifications, and their events.
    """
    return {
        "job": spec.job_id,
        "mode": str(spec.mode),
        "pod": spec.name,
        "replicas": spec.replicas,
        "log_dir": str(spec.log_dir),
        "notify": notifiers or None,
        "pre_hook": list(spec.pre_hook.argv) if spec.pre_hook else None,
        "containers": [_container(each, environ) for each in spec.containers],
    }


def _container(spec: ContainerSpec, environ: Environ) -> Document:
    changed = {name: value for name, value in spec.env.items() if environ.get(name) != value}
    return {
        "name": spec.name,
        "role": str(spec.role),
        "rank": spec.rank,
        "endpoint": spec.endpoint,
        "command": list(spec.argv),
        "log": str(spec.log),
        "environment": masked(dict(sorted(changed.items()))),
        "removed_from_environment": sorted(name for name in environ if name not in spec.env),
    }


def plan_as_json(spec: PodSpec, environ: Environ, notifiers: str) -> str:
    """Return the plan as indented JSON, in valid UTF-8."""
    text = json.dumps(plan_document(spec, environ, notifiers), indent=2, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()  # bytes that are not UTF-8 become JSON escapes


def plan_as_text(spec: PodSpec, environ: Environ, notifiers: str) -> list[str]:
    """Return the plan as lines for a person."""
    plan = plan_document(spec, environ, notifiers)
    count = "1 process" if plan["replicas"] == 1 else f"{plan['replicas']} processes"
    lines = [f"job {plan['job']}, mode {plan['mode']}: {count}; nothing was started"]
    if plan["pre_hook"]:
        lines.append(f"before each start: {shlex.join(plan['pre_hook'])}")
    if notifiers:
        lines.append(f"notifies {notifiers}")
    for container in plan["containers"]:
        lines += ["", f"{container['name']}  {container['endpoint']}"]
        lines.append(f"  command  {shlex.join(container['command'])}")
        lines.append(f"  log      {container['log']}")
        lines += [f"  {name}={value}" for name, value in container["environment"].items()]
    lines += ["", "Ports and the pod name are examples: each run chooses its own."]
    return lines
