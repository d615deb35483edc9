from trainers.collective.configs import LocalSGDConfigs
from trainers.collective.data_parallel import Cadence


def test_every_backward_pass_is_an_update_by_default() -> None:
    cadence = Cadence()
    for _ in range(3):
        assert (cadence.merges, cadence.alone, cadence.exchanges) == (False, False, True)
        assert not cadence.update()


def test_the_last_of_some_backward_passes_exchanges() -> None:
    cadence = Cadence(3)
    for _ in range(2):
        for left in (2, 1):
            assert cadence.merges
            assert not cadence.exchanges
            cadence.merge()
            assert cadence.merged == 3 - left
        assert cadence.exchanges
        cadence.update()
    assert cadence.updates == 2


def test_an_update_that_did_not_take_place_begins_anew() -> None:
    cadence = Cadence(2)
    cadence.merge()
    cadence.drop()
    assert (cadence.merged, cadence.updates, cadence.merges) == (0, 0, True)


def test_updates_alone_from_the_begin_step_on() -> None:
    cadence = Cadence(1, LocalSGDConfigs(k_steps=2, begin_step=3))
    seen = []
    for _ in range(6):
        seen.append((cadence.exchanges, together := cadence.update()))
        if together:
            cadence.apart = 0
    assert seen == [
        (True, False),
        (True, False),
        (False, False),
        (False, True),
        (False, False),
        (False, True),
    ]


def test_a_job_that_goes_on_does_not_begin_anew() -> None:
    cadence = Cadence(1, LocalSGDConfigs(k_steps=2, begin_step=3))
    cadence.resume(5, 0)
    assert cadence.alone
    assert [cadence.update(), cadence.update()] == [False, True]
