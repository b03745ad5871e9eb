"""What is done to engines from within: code for `Engine.call("execute")`."""
from __future__ import annotations

# At the second layer of the next load a process is killed, and the load goes on when that is known. Fields: pid, cluster_id.
KILL_IN_A_LOAD = """
import os, signal, time
endpoint = agent.connector()._shared.endpoint
pull = endpoint.pull
def killing(wanted, into, layer):
    if layer == 1:
        endpoint.pull = pull
        os.kill({pid}, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while endpoint.is_usable({cluster_id}) and time.monotonic() < deadline:
            time.sleep(0.001)
    pull(wanted, into, layer)
endpoint.pull = killing
"""

# Pulls stand until LET_GO is executed.
HOLD_LOADS = """
import threading
endpoint = agent.connector()._shared.endpoint
agent.stands, agent.goes_on, agent.pull = threading.Event(), threading.Event(), endpoint.pull
def held(wanted, into, layer):
    agent.stands.set()
    assert agent.goes_on.wait(60)
    agent.pull(wanted, into, layer)
endpoint.pull = held
"""
IS_HELD = "result = agent.stands.wait(20)"
LET_GO = """
agent.connector()._shared.endpoint.pull = agent.pull
agent.goes_on.set()
"""

# How long a load may take, made short and as it was.
SHORT_MS = 100
SHORT_DEADLINE = f"""
import dataclasses
endpoint = agent.connector()._shared.endpoint
agent.settings = endpoint.settings
endpoint.settings = dataclasses.replace(agent.settings, timeout_ms={SHORT_MS})
"""
LONG_DEADLINE = "agent.connector()._shared.endpoint.settings = agent.settings"
