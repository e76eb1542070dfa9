"""`SimWorld`: the simulated outside of one run - processes, network, devices, executors and files on one `SimLoop`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvcore.ports import ClientTransport, Clock, Executor, Files, Notice, ServerTransport, Tracer
from kvcore.service.local import LocalServerTransport
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.clock import SimClock
from kvcore.sim.ports.copy import SimCopyEngine
from kvcore.sim.ports.deaths import SimDeaths
from kvcore.sim.ports.device_rules import DeviceRules
from kvcore.sim.ports.executor import SimExecutor
from kvcore.sim.ports.files import SimFiles
from kvcore.sim.ports.frames import name_of
from kvcore.sim.ports.network import SimNetwork
from kvcore.sim.ports.notice import SimNotice
from kvcore.sim.process import SimProcess

T = TypeVar("T")


class SimWorld:
    """`in_process`: one process and in-memory transports instead of a network.

    `page_ns` is the range of one page copy; the default makes a store last several steps of the simulated engine, so
    that preemption meets copies in flight. `l2_latency_ns` is the range of one blocking piece of L2 work, and
    `reconnect_ns` the time that a cut connection takes to come back.

    A disk survives the process that used it: `files` of the same name is the same disk, also after `restart`.
    """

    def __init__(
        self,
        loop: SimLoop,
        *,
        in_process: bool,
        page_ns: tuple[int, int] = (10_000, 200_000),
        load_page_ns: tuple[int, int] = (500, 20_000),
        l2_latency_ns: tuple[int, int] = (10_000, 200_000),
        copy_ns: tuple[int, int] = (10_000, 200_000),
        reconnect_ns: int = 0,
    ) -> None:
        self.loop = loop
        self.process_clocks = SimClock(loop)
        self.clock: Clock = self.process_clocks
        self.tracer: Tracer = loop.trace
        self.in_process = in_process
        self._page_ns = page_ns
        self._load_page_ns = load_page_ns
        self._l2_latency_ns = l2_latency_ns
        self._copy_ns = copy_ns
        self.network = SimNetwork(loop, reconnect_ns=reconnect_ns)
        self.network.name_of = name_of
        self.disks: dict[str, SimFiles] = {}
        self._device_rules: dict[str, DeviceRules] = {}
        self._local: dict[int, LocalServerTransport] = {}
        self._processes: dict[str, SimProcess] = {}

    def process(self, name: str) -> SimProcess:
        """The process called `name`; in-process, everything is one, called "engine"."""
        name = "engine" if self.in_process else name
        if name not in self._processes:
            self._processes[name] = self.loop.process(name)
        return self._processes[name]

    @property
    def processes(self) -> list[SimProcess]:
        """All that were ever named, in the order in which they were made."""
        return list(self._processes.values())

    def inside(self, process: str, build: Callable[[], T]) -> T:
        return self.process(process).run(build)

    def restart(self, name: str, *, torn: bool = False) -> None:
        """Kill a process and start it again, empty. `torn`: the power fails too, so that unflushed files are cut."""
        self.crash(name, torn=torn)
        self.process(name).restart()

    def crash(self, name: str, *, torn: bool = False) -> None:
        if not self.process(name).alive:
            return
        self.process(name).crash()
        for disk_name, disk in self.disks.items():
            if self.process(disk_name.partition(".")[0]) is self.process(name):
                disk.kill(torn=torn)
                disk.restart()

    def notice(self) -> Notice:
        return SimNotice(self.loop)

    def executor(self, name: str) -> Executor:
        latency_ns = self._copy_ns if name.endswith(".copy") else self._l2_latency_ns
        return SimExecutor(self.loop, name=name, latency_ns=latency_ns)

    def files(self, name: str) -> Files:
        if name not in self.disks:
            self.disks[name] = SimFiles(self.loop)
        return self.disks[name]

    def listen(self, server: int) -> ServerTransport:
        if self.in_process:
            self._local[server] = LocalServerTransport(self.loop)
            return self._local[server]
        return self.network.listen(f"server{server}")

    def connect(self, server: int, client: str) -> ClientTransport:
        if self.in_process:
            return self._local[server].connect()
        return self.network.connect(f"server{server}", f"{client}>server{server}")

    def deaths(self) -> SimDeaths:
        """Proofs of death for the process that is running."""
        return SimDeaths(self.loop, self._processes)

    def process_name(self, process: str) -> str:
        """How the present life of a process is named to whoever proves deaths; "" where all is one process."""
        return "" if self.in_process else str(self.process(process).life)

    def device_rules(self, name: str) -> DeviceRules:
        """What goes wrong on the device called `name`, also after its process has started again."""
        return self._device_rules.setdefault(name, DeviceRules())

    @property
    def all_device_rules(self) -> list[DeviceRules]:
        """Of every device that there has been."""
        return list(self._device_rules.values())

    def device(self, rank: int) -> SimCopyEngine:
        name = f"device{rank}"
        device = SimCopyEngine(self.loop, name, page_ns=self._page_ns, rules=self.device_rules(name))
        device.page_ns_of["load"] = self._load_page_ns
        return device
