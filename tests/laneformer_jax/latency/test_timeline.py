import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer_jax.latency.timeline import Task, Timeline, longest_chain

SERVERS = {"memory": 1, "links": 2}


def test_a_shared_resource_serves_in_order():
    line = Timeline()
    a = line.add("read", 2.0, resource="memory")
    b = line.add("read", 3.0, resource="memory")
    c = line.add("think", 1.0, (a,))
    d = line.add("end", 0.5, (b, c))
    events = line.run(SERVERS)
    assert events.start == [0.0, 2.0, 2.0, 5.0]
    assert events.end[d] == 5.5
    # Through the resource that b waited for, not through c.
    assert events.path(d) == [(a, 2.0), (b, 3.0), (d, 0.5)]
    assert events.path(d, since=4.0) == [(b, 1.0), (d, 0.5)]


def test_a_message_leaves_the_wire_before_it_arrives():
    line = Timeline()
    for _ in range(3):
        line.add("send", 10.0, resource="memory", hold=1.0)
    assert line.run(SERVERS).end == [10.0, 11.0, 12.0]
    in_order = Timeline()
    for _ in range(3):
        in_order.add("send", 10.0, resource="memory")
    assert in_order.run(SERVERS).end == [10.0, 20.0, 30.0]


def test_two_servers():
    line = Timeline()
    for seconds in (3.0, 1.0, 1.0):
        line.add("send", seconds, resource="links")
    assert line.run(SERVERS).start == [0.0, 0.0, 1.0]


@st.composite
def timelines(draw):
    line = Timeline()
    for number in range(draw(st.integers(1, 25))):
        earlier = st.integers(0, max(number - 1, 0))
        seconds = draw(st.sampled_from([0.0, 0.5, 1.0, 2.5]))
        line.add(
            "work",
            seconds,
            tuple(draw(st.lists(earlier, max_size=3 if number else 0))),
            draw(st.sampled_from([None, "memory", "links"])),
            draw(st.sampled_from([0.0, seconds])),
        )
    return line


@given(timelines())
@settings(max_examples=100, deadline=None)
def test_bounds_and_critical_path(line):
    events = line.run(SERVERS)
    last = max(range(len(line.tasks)), key=lambda n: events.end[n])
    total = events.end[last]
    assert total >= longest_chain(line.tasks)
    for name, count in SERVERS.items():
        held = sum(task.hold for task in line.tasks if task.resource == name)
        assert total >= held / count - 1e-9
    for task, start in zip(line.tasks, events.start, strict=True):
        assert all(events.end[earlier] <= start for earlier in task.after)
    assert sum(seconds for _, seconds in events.path(last)) == pytest.approx(total)


@given(timelines(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_longer_task_makes_nothing_earlier(line, data):
    number = data.draw(st.integers(0, len(line.tasks) - 1))
    before = line.run(SERVERS).end
    task = line.tasks[number]
    line.tasks[number] = Task(
        task.kind, task.seconds + 0.75, task.after, task.resource, task.hold + 0.25
    )
    after = line.run(SERVERS).end
    assert all(b <= a for b, a in zip(before, after, strict=True))
