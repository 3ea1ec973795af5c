use super::*;
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

const MS: u64 = 1_000_000;

fn file(bytes: u64, seals: SealFlags) -> OwnedFd {
    let file = memfd_create("slice", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, bytes).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

fn slices(count: usize, slice: u64) -> Vec<Slice> {
    let file = file(BYTES, SealFlags::SHRINK);
    (0..count).map(|_| Slice::open(&file, Duration::from_millis(slice)).unwrap()).collect()
}

fn charged(slice: &Slice) -> u64 {
    slice.words.all()[CHARGED].load(SeqCst)
}

#[test]
fn a_file_that_may_shrink_or_is_too_short_is_none() {
    let check = |bytes, seals, slice, is_one: bool| {
        let opened = Slice::open(&file(bytes, seals), Duration::from_millis(slice));
        assert_eq!(opened.is_ok(), is_one, "{bytes} {seals:?} {slice}");
    };
    check(BYTES, SealFlags::SHRINK, 20, true);
    check(BYTES, SealFlags::SHRINK, 99, true);
    check(BYTES, SealFlags::SHRINK, 100, false);
    check(BYTES, SealFlags::SHRINK, 0, false);
    check(BYTES - 8, SealFlags::SHRINK, 20, false);
    check(BYTES, SealFlags::GROW, 20, false);
}

/// What workers say in turn, each from when to when, what is charged of it, and how long is to be waited then; in ms.
#[test]
fn what_was_used_beyond_the_slice_is_paid_by_waiting() {
    let check = |slice, says: &[(usize, u64, u64, u64, u64)]| {
        let workers = slices(3, slice);
        for (worker, from, to, expect, wait) in says {
            let before = charged(&workers[0]);
            workers[*worker].charge(from * MS, to * MS);
            let found = (charged(&workers[0]) - before, workers[0].wait(to * MS));
            assert_eq!(found, (expect * MS, Duration::from_millis(*wait)), "{slice}: {worker} {from} {to}");
        }
    };
    // A period's worth is free.
    check(20, &[(0, 1000, 1020, 20, 0), (0, 1020, 1040, 20, 80)]);
    // It is paid by time, and what was not used is kept for a period.
    check(
        20,
        &[(0, 1000, 1100, 100, 400), (0, 1500, 1500, 0, 0), (0, 9000, 9020, 20, 0), (0, 9020, 9021, 1, 4)],
    );
    // Two at once are busy once, in whatever order they say so.
    check(20, &[(0, 1000, 1040, 40, 100), (1, 1000, 1040, 0, 100)]);
    check(20, &[(0, 1002, 1008, 6, 0), (1, 1000, 1010, 4, 0), (2, 1004, 1012, 2, 0)]);
    check(20, &[(1, 1030, 1040, 10, 0), (0, 1000, 1040, 30, 100), (1, 1040, 1041, 1, 104)]);
    // What is longer than the file has room for counts as that.
    check(50, &[(0, 1000, 20_000, 4080, 8060)]);
    // What is owed is an hour at most.
    check(1, &[(0, 10_000, 13_000, 3000, 299_900), (0, 13_000, 17_000, 4000, 695_900)]);
    let long: Vec<_> = (0..20).map(|at| (0, at * 4000, (at + 1) * 4000)).collect();
    let workers = slices(1, 1);
    long.iter().for_each(|(worker, from, to)| workers[*worker].charge(from * MS, to * MS));
    assert_eq!(workers[0].wait(80_000 * MS), MOST - PERIOD);
}

#[test]
fn whatever_is_in_the_file_harms_nobody_for_ever() {
    for word in [0, 1, u64::MAX, 7 << 32 | 5, u64::MAX << 32] {
        let workers = slices(1, 20);
        workers[0].words.all().iter().for_each(|slot| slot.store(word, SeqCst));
        let now = 5000 * MS;
        workers[0].charge(now - 3 * MS, now);
        assert!(workers[0].wait(now) < MOST, "{word}");
        workers[0].charge(0, u64::MAX);
        workers[0].charge(u64::MAX, 0);
    }
}

proptest! {
    /// Workers look at their streams at times of their own, and say what they saw in any order: all that any of them saw is charged, and once.
    #[test]
    fn what_is_charged_is_the_union_of_what_was_seen(
        mut seen in prop::collection::vec((0usize..4, 0u64..4000, 0u64..80), 1..200),
        order in any::<bool>(),
    ) {
        if order {
            seen.sort_by_key(|(_, from, len)| from + len);
        }
        let workers = slices(4, 20);
        let mut busy = vec![false; 4100];
        for (worker, from, len) in &seen {
            workers[*worker].charge(from * TICK, (from + len) * TICK);
            busy[*from as usize..(from + len) as usize].fill(true);
        }
        let union = busy.iter().filter(|tick| **tick).count() as u64 * TICK;
        prop_assert_eq!(charged(&workers[0]), union);
    }

    /// Of a program that is busy whenever it may be, in pieces: no more than its slice, what a period is free, and a piece.
    #[test]
    fn no_more_is_used_than_the_slice_and_a_piece(
        slice in 1u64..100,
        pieces in prop::collection::vec((1u64..60, 0u64..30), 1..100),
    ) {
        let workers = slices(2, slice);
        let start = 1_000_000 * MS;
        let (mut now, mut used) = (start, 0);
        for (piece, pause) in &pieces {
            now += workers[0].wait(now).as_nanos() as u64;
            now = now.next_multiple_of(TICK);
            // Both see it.
            workers.iter().for_each(|worker| worker.charge(now, now + piece * MS));
            now += piece * MS;
            used += piece * MS;
            now += pause * MS;
        }
        let longest = pieces.iter().map(|(piece, _)| piece * MS).max().unwrap_or(0);
        let most = (now - start) * slice / 100 + 2 * slice * MS + longest;
        prop_assert!(used <= most, "{used} of {most}");
        prop_assert_eq!(charged(&workers[0]), used);
    }
}

#[test]
fn threads_that_charge_at_once_charge_once() {
    let workers = slices(4, 50);
    std::thread::scope(|scope| {
        for worker in &workers {
            scope.spawn(move || (0..4000).for_each(|at| worker.charge(at * TICK, (at + 3) * TICK)));
        }
    });
    assert_eq!(charged(&workers[0]), 4002 * TICK);
}
