//! What real assemblers say of the PTX: every kernel under vm-ir/filetests/run, and every op on every type, for
//! each architecture. With a number in `SWEEP_SEED` each is assembled for one of them.

mod assembler;
mod kernels;
mod ops;
mod sampling;
mod sweep;
mod tiles;

#[test]
fn a_seed_takes_one_alternative_and_seeds_take_turns() {
    assert_eq!(sweep::chosen(None, "x", 0..8), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert!(sweep::chosen(Some(7), "x", 0..0).is_empty());
    let of = |what: &str| (0..100).flat_map(|seed| sweep::chosen(Some(seed), what, 0..8)).collect::<Vec<_>>();
    for what in ["x", "y"] {
        assert_eq!(of(what), of(what));
        assert!(of(what).len() == 100 && (0..8).all(|one| of(what).contains(&one)), "{:?}", of(what));
    }
    assert_ne!(of("x"), of("y"));
}
