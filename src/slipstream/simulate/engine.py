"""The event loop of a simulation.

Owns: virtual time, trajectories as sequences of turns, the trainer's cycle, and what is measured.
Refuses: deciding anything a schedule or a router decides: it drives ``build_schedule`` and ``build_policy`` of the
library, with the same calls as the training loop, so that what is simulated is what runs.

The trainer's cycle is that of the loop: begin a step, pump the schedule until it selects, update, publish (after the
running groups when ``drains_before_publish``; after running requests with pause ``wait``), end the step.

>>> from slipstream.simulate.scenario import load_scenario
>>> outcome = simulate(load_scenario([], ["schedule.steps=4", "schedule.prompts_per_step=4", "work.turn_tokens=50"]))
>>> len(outcome.steps), outcome.lags
(4, {0: 1.0})
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from slipstream.errors import ContractError
from slipstream.inference.routing import ReplicaView, RouteRequest, build_policy
from slipstream.schedule import Selection, build_schedule
from slipstream.simulate.distributions import Distribution
from slipstream.simulate.outcome import Lane, Outcome, StepFigures, Stretch
from slipstream.simulate.replica import Replica, Request
from slipstream.simulate.scenario import Scenario
from slipstream.trajectory import Completed, Group, Missing, Reward, Row, SamplingSpec, Span, Trajectory, VersionRun

REFUSED = "refused"
_BLOCK = 64
"""Tokens that one id stands for where a router looks at prompts."""


@dataclass
class _Episode:
    """One trajectory: its turns to come, and the tokens so far by version."""

    name: str
    group: _GroupRun
    turns: list[tuple[float, float, float]]
    """``(tokens, observation tokens, environment seconds)`` of each turn."""
    context: float
    done: dict[int, float] = field(default_factory=dict)
    request: Request | None = None
    replica: Replica | None = None


@dataclass
class _GroupRun:
    name: str
    prompt: float
    started: float
    fate: str
    episodes: list[_Episode] = field(default_factory=list)
    left: int = 0
    gone: bool = False

    @property
    def tokens(self) -> float:
        return sum(sum(e.done.values()) for e in self.episodes)


class Simulation:
    """One run of a scenario; ``run`` once."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()
        self._rng = Random(scenario.seed)
        self._replicas = [Replica(f"http://replica-{i}", scenario.engines) for i in range(scenario.engines.replicas)]
        self._router = build_policy(scenario.engines.router)
        self.schedule = build_schedule(scenario.schedule, self._judge, clock=lambda: self.now)
        self._groups: dict[str, _GroupRun] = {}
        self._prompts = 0
        self._attempts: Counter[str] = Counter()
        self._held: list[_Episode] | None = None
        """Requests that wait for a publish (pause ``wait``); None when none is due."""
        self._phase = "collect"
        self._version = 0
        self._began = 0.0
        self._selected = 0.0
        self._ready_since = 0.0
        self._selection: Selection | None = None
        self._due = False
        self._touched: dict[str, Replica] = {}
        self._by_url = {replica.url: replica for replica in self._replicas}
        self._steps: list[StepFigures] = []
        self._timeline: list[Stretch] = []
        self._occupancy: list[tuple[float, int]] = [(0.0, 0)]
        self._group_seconds: list[float] = []
        self._turn_seconds: list[float] = []
        self._left_out: Counter[str] = Counter()
        self._sampled_lengths: list[float] = []
        self._trained_lengths: list[float] = []

    # -- time ----------------------------------------------------------------------------------------------------

    def run(self, warmup: int | None = None) -> Outcome:
        """Run all steps.

        Args:
            warmup: first steps that rates leave out; None leaves out a fifth, at most 10.  The last steps are left
                out too, as many as the schedule may run ahead.

        Raises:
            SlipstreamError: the schedule ends the run (no group passes, ...), as it would end a real one.
        """
        total = self.scenario.schedule.steps
        if total < 1:
            raise ContractError("a simulation needs schedule.steps >= 1")
        self._begin()
        self._settle()
        while len(self._steps) < total:
            if not self._events:
                raise ContractError(
                    f"simulation: nothing can happen at step {self.schedule.current + 1} ({self._phase}); "
                    f"{len(self.schedule.running())} groups run"
                )
            self.now, _, act = heapq.heappop(self._events)
            act()
            self._settle()
        return self._outcome(min(total // 5, 10) if warmup is None else warmup)

    def _settle(self) -> None:
        """After an event: pump if the schedule may have something to say, then plan the replicas that were touched."""
        while self._due:
            self._due = False
            self._pump()
        for replica in self._touched.values():
            self._plan(replica)
        if self._touched:
            self._touched.clear()
            running = sum(r.running for r in self._replicas)
            if running != self._occupancy[-1][1]:
                self._occupancy.append((self.now, running))

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._ids), act))

    def _draw(self, distribution: Distribution) -> float:
        return distribution.sample(self._rng)

    # -- the trainer's cycle -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.schedule.begin_step(len(self._steps))
        self._began, self._phase, self._due = self.now, "collect", True

    def _pump(self) -> None:
        """Abort, start, select: whatever may happen now."""
        for group_id, why in self.schedule.aborts():
            self._cancel(group_id)
            self.schedule.cancelled(group_id, why)
        for _ in range(self.schedule.admit()):
            self._start(self.schedule.next_requeued())
        if self._phase == "collect" and (selection := self.schedule.select()) is not None:
            self._update(selection)
        elif self._phase == "drain" and not self.schedule.running():
            self._publish()
        elif self._phase == "settle" and not any(replica.load for replica in self._replicas):
            self._publish_now()

    def _update(self, selection: Selection) -> None:
        trainer = self.scenario.trainer
        tokens = sum(self._groups[group.group_id].tokens for group in selection.groups)
        seconds = self._draw(trainer.update_seconds) + trainer.update_seconds_per_token * tokens
        self._mark("wait", self._began)
        self._selection, self._selected, self._phase = selection, self.now, "update"
        self._due = True
        self._after(seconds, self._updated)

    def _updated(self) -> None:
        self._mark("update", self._selected)
        self._ready_since = self.now
        if (len(self._steps) + 1) % self.scenario.trainer.publish_every:
            self._end_step()
            return
        if self.schedule.drains_before_publish and self.schedule.running():
            self._phase = "drain"
            return
        self._publish()

    def _publish(self) -> None:
        if self.scenario.trainer.pause == "wait" and any(replica.load for replica in self._replicas):
            self._held, self._phase = [], "settle"
            return
        self._publish_now()

    def _publish_now(self) -> None:
        self._phase = "publish"
        self._mark("wait", self._ready_since)
        for replica in self._replicas:
            replica.advance(self.now)
            replica.pause()
        start = self.now
        self._after(self._draw(self.scenario.trainer.publish_seconds), lambda: self._published(start))

    def _published(self, start: float) -> None:
        self._mark("publish", start)
        self._version += 1
        anew = self.scenario.trainer.pause == "abort"
        for replica in self._replicas:
            replica.advance(self.now)
            replica.resume(self._version, anew=anew)
            self._touched[replica.url] = replica
        held, self._held = self._held or [], None
        for episode in held:
            self._ask(episode)
        self._end_step()

    def _end_step(self) -> None:
        self._record()
        self.schedule.end_step(len(self._steps) - 1)
        if len(self._steps) < self.scenario.schedule.steps:
            self._begin()

    def _mark(self, kind: Lane, start: float) -> None:
        if self.now > start:
            self._timeline.append(Stretch(kind, start, self.now))

    # -- groups and turns ----------------------------------------------------------------------------------------

    def _start(self, again: str | None) -> None:
        if again is None:
            name = f"p{self._prompts}"
            self._prompts += 1
        else:
            prompt = again.split("~")[0]
            self._attempts[prompt] += 1
            name = f"{prompt}~{self._attempts[prompt]}"
        self.schedule.submitted(name, again)
        group = self._sampled_group(name)
        self._groups[name] = group
        for episode in group.episodes:
            self._ask(episode)

    def _sampled_group(self, name: str) -> _GroupRun:
        """All lengths of a group, drawn from its own stream: they do not depend on the schedule."""
        work = self.scenario.work
        rng = Random(f"{self.scenario.seed}/{name}")
        toss = rng.random()
        fate = (
            "failed" if toss < work.failed_share else REFUSED if toss < work.failed_share + work.refused_share else ""
        )
        group = _GroupRun(name, work.prompt_tokens.sample(rng), self.now, fate)
        difficulty = rng.random()
        for i in range(work.samples_per_prompt):
            turns = []
            for _ in range(max(1, round(work.turns.sample(rng)))):
                own = difficulty if rng.random() < work.common else rng.random()
                tokens = max(1.0, work.turn_tokens.quantile(min(max(own, 1e-6), 1 - 1e-6)))
                turns.append((tokens, work.observation_tokens.sample(rng), work.env_seconds.sample(rng)))
            group.episodes.append(_Episode(f"{name}/{i}", group, turns, group.prompt))
        group.left = len(group.episodes)
        return group

    def _ask(self, episode: _Episode) -> None:
        """The episode's next turn goes to a replica."""
        if episode.group.gone:
            return
        if self._held is not None:
            self._held.append(episode)
            return
        views = [ReplicaView(replica.url, replica.load) for replica in self._replicas]
        url = self._router.choose(RouteRequest(episode.name, self._ids_of(episode)), views, self.now)
        replica = self._by_url[url]
        request = Request(
            episode.name, episode.group.name, episode.context, episode.group.prompt, episode.turns[0][0], self.now,
            owner=episode,
        )  # fmt: skip
        episode.request, episode.replica = request, replica
        replica.advance(self.now)
        replica.start(request)
        self._touched[replica.url] = replica

    def _ids_of(self, episode: _Episode) -> tuple[int, ...]:
        """Ids that share a prefix as the prompts do, for policies that look at them."""
        if self._router.name != "cache_aware":
            return ()
        shared = Random(episode.group.name).randrange(10**6) * 1000
        own = Random(episode.name).randrange(10**6) * 1000
        head = int(episode.group.prompt // _BLOCK)
        return tuple(shared + i for i in range(head)) + tuple(
            own + i for i in range(int(episode.context // _BLOCK) - head)
        )

    def _plan(self, replica: Replica) -> None:
        """Look again when the replica's next sequence ends, unless something changes before."""
        at = replica.next_completion()
        if at is not None:
            epoch = replica.epoch
            self._after(max(at - self.now, 0.0), lambda: self._complete(replica, epoch))

    def _complete(self, replica: Replica, epoch: int) -> None:
        if replica.epoch != epoch:
            return
        replica.advance(self.now)
        self._touched[replica.url] = replica
        for request in replica.finished():
            self._turn_done(request.owner, request)
        self._due = self._due or self._phase == "settle"

    def _turn_done(self, episode: _Episode, request: Request) -> None:
        self._turn_seconds.append(self.now - request.arrived)
        for version, tokens in request.done.items():
            episode.done[version] = episode.done.get(version, 0.0) + tokens
        tokens, observation, seconds = episode.turns.pop(0)
        episode.context += tokens + observation
        episode.request = None
        if seconds > 0:
            self._after(seconds, lambda: self._next_turn(episode))
        else:
            self._next_turn(episode)

    def _next_turn(self, episode: _Episode) -> None:
        if episode.group.gone:
            return
        if episode.turns:
            self._ask(episode)
            return
        self._router.finish_session(episode.name)
        episode.group.left -= 1
        if episode.group.left == 0:
            self._group_done(episode.group)

    def _group_done(self, group: _GroupRun) -> None:
        self._group_seconds.append(self.now - group.started)
        self._sampled_lengths.append(group.tokens)
        self.schedule.finished(_as_group(group))
        self._due = True

    def _cancel(self, group_id: str) -> None:
        group = self._groups.pop(group_id)
        group.gone = True
        self._sampled_lengths.append(sum(t for e in group.episodes for t, *_ in e.turns) + group.tokens)
        for episode in group.episodes:
            self._router.finish_session(episode.name)
            if episode.request is not None and episode.replica is not None:
                episode.replica.advance(self.now)
                episode.replica.cancel(episode.request)
                self._touched[episode.replica.url] = episode.replica

    def _judge(self, group: Group) -> str | None:
        return REFUSED if self._groups[group.group_id].fate == REFUSED else None

    # -- figures -------------------------------------------------------------------------------------------------

    def _record(self) -> None:
        selection = self._selection
        assert selection is not None
        step = len(self._steps)
        groups = [self._groups.pop(group.group_id) for group in selection.groups]
        for group, reason in selection.left_out:
            self._left_out[reason] += 1
            self._groups.pop(group.group_id, None)
        episodes = [episode for group in groups for episode in group.episodes]
        token_lags: Counter[int] = Counter()
        for episode in episodes:
            for version, tokens in episode.done.items():
                token_lags[step // self.scenario.trainer.publish_every - version] += tokens  # type: ignore[assignment]
        self._trained_lengths += [group.tokens for group in groups]
        self._steps.append(
            StepFigures(
                started=self._began,
                selected=self._selected,
                ended=self.now,
                groups=len(groups),
                tokens=sum(group.tokens for group in groups),
                lags=Counter(selection.lags.values()),
                token_lags=token_lags,
                mixed=sum(len(episode.done) > 1 for episode in episodes),
                trajectories=len(episodes),
                waits=list(selection.waits.values()),
            )
        )

    def _outcome(self, warmup: int) -> Outcome:
        for replica in self._replicas:
            replica.advance(self.now)
        whole = max(self.now, 1e-9)
        busy = sum(r.busy_seconds for r in self._replicas)
        paused = sum(r.paused_seconds for r in self._replicas) / len(self._replicas)
        known = sum(r.cached_tokens for r in self._replicas)
        seen = known + sum(r.computed_tokens for r in self._replicas)
        waited = sum(s.end - s.start for s in self._timeline if s.kind == "wait")
        sampled = self._sampled_lengths
        trained = self._trained_lengths
        bias = (sum(trained) / len(trained)) / (sum(sampled) / len(sampled)) - 1 if trained and sampled else 0.0
        schedule, total = self.scenario.schedule, len(self._steps)
        ahead = {"sync": 0, "one_step_off": 1}.get(schedule.kind, schedule.max_staleness_steps)
        warmup = min(warmup, total - 1)
        return Outcome(
            schedule=schedule.kind,
            steps=self._steps,
            warmup=warmup,
            cooldown=min(ahead, (total - warmup - 1) // 2),
            seconds=self.now,
            trainer_idle=waited / whole,
            engine_idle=1 - busy / (whole * len(self._replicas)) - paused / whole,
            engine_paused=paused / whole,
            batch=sum(r.batch_seconds for r in self._replicas) / max(busy, 1e-9),
            cache_hits=known / max(seen, 1e-9),
            group_seconds=self._group_seconds,
            turn_seconds=self._turn_seconds,
            left_out=self._left_out,
            evicted_share=self.schedule.metrics().get("schedule/evicted_share", 0.0),
            length_bias=bias,
            timeline=self._timeline,
            occupancy=self._occupancy,
        )


def _as_group(run: _GroupRun) -> Group:
    """The record that a schedule sees: one member with one token, scored unless the group has failed."""
    sampled = Span.sampled([0], [-1.0], [VersionRun("policy/0/0", 0, 1)], SamplingSpec(), turn=0)
    reward = Reward(0, Missing("simulated failure") if run.fate == "failed" else 0.0)
    member = Trajectory(
        trajectory_id=f"{run.name}/0", group_id=run.name, prompt_uid=run.name, sample=0, attempt=0,
        rows=(Row((sampled,)),), turns=(), rewards=(reward,), outcome=Completed(), scheduled_step=0,
    )  # fmt: skip
    return Group(run.name, run.name, 1, (member,))


def simulate(scenario: Scenario, warmup: int | None = None) -> Outcome:
    """Run a scenario; see ``Simulation.run``."""
    return Simulation(scenario).run(warmup)
