//! Random sequences of requests, kills and restarts: the API, the ledger and the drivers agree with a model after each.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::json;
use vm_passthrough::{claim, ledger};

use super::*;

/// What somebody does.
#[derive(Clone, Copy, Debug)]
enum Act {
    Start(u8, u8),
    Stop(u8),
    Attach(u8, u8),
    Detach(u8, u8),
    /// The guest's process is killed.
    Kill(u8),
    /// An operator claims a disk until it is released.
    Claim(u8),
    Release(u8),
    /// The daemon ends, and is started again.
    Restart,
}

fn act() -> impl Strategy<Value = Act> {
    let (guest, disk) = (0..2u8, 0..DISKS);
    prop_oneof![
        3 => (guest.clone(), 0..1u8 << DISKS).prop_map(|(guest, disks)| Act::Start(guest, disks)),
        1 => guest.clone().prop_map(Act::Stop),
        4 => (guest.clone(), disk.clone()).prop_map(|(guest, disk)| Act::Attach(guest, disk)),
        2 => (guest.clone(), disk.clone()).prop_map(|(guest, disk)| Act::Detach(guest, disk)),
        1 => guest.prop_map(Act::Kill),
        1 => disk.clone().prop_map(Act::Claim),
        1 => disk.prop_map(Act::Release),
        1 => Just(Act::Restart),
    ]
}

/// Who should have what.
#[derive(Default)]
struct Model {
    guests: BTreeMap<u8, BTreeSet<u8>>,
    operator: BTreeSet<u8>,
}

impl Model {
    fn is_used(&self, disk: u8) -> bool {
        self.guests.values().any(|disks| disks.contains(&disk))
    }
}

fn name(guest: u8) -> String {
    format!("web{guest}")
}

/// Does it, and answers whether it was done.
fn perform(world: &mut World, act: Act) -> bool {
    let operator = |world: &World, command: &str, number: u8| {
        let args = ["vm-service", command, &disk(number).to_string()].map(Into::into);
        crate::cli::run(
            args,
            Some(world.host.clone()),
            "/nonexistent".as_ref(),
            &mut Vec::new(),
            &mut Vec::new(),
        ) == 0
    };
    let device = |guest, number| format!("/v1/guests/{}/devices/{}", name(guest), disk(number));
    let is_done = |(status, answer): (u16, Value)| {
        assert!(status < 300 || answer["code"].is_string(), "{status} {answer}");
        status < 300
    };
    match act {
        Act::Start(guest, disks) => {
            let disks: Vec<_> = (0..DISKS).filter(|number| disks >> number & 1 == 1).map(disk).collect();
            is_done(world.call("PUT", &format!("/v1/guests/{}", name(guest)), Some(&world.file(&disks))))
        }
        Act::Stop(guest) => is_done(world.call("POST", &format!("/v1/guests/{}/stop", name(guest)), None)),
        Act::Attach(guest, number) => is_done(world.call("PUT", &device(guest, number), Some(&json!({})))),
        Act::Detach(guest, number) => is_done(world.call("DELETE", &device(guest, number), None)),
        Act::Kill(guest) => {
            let lives = world.threads.has(&name(guest));
            if lives {
                world.threads.kill(&world.sim, &world.host, &name(guest));
            }
            lives
        }
        Act::Claim(number) => operator(world, "claim", number),
        Act::Release(number) => operator(world, "release", number),
        Act::Restart => {
            world.end();
            world.serve();
            true
        }
    }
}

/// Whether it should be done, and what is then.
fn expect(model: &mut Model, act: Act) -> bool {
    match act {
        Act::Start(guest, disks) => {
            let disks: BTreeSet<_> = (0..DISKS).filter(|number| disks >> number & 1 == 1).collect();
            let is_free =
                !model.guests.contains_key(&guest) && !disks.iter().any(|&disk| model.is_used(disk));
            if is_free {
                model.guests.insert(guest, disks);
            }
            is_free
        }
        Act::Stop(guest) | Act::Kill(guest) => model.guests.remove(&guest).is_some(),
        Act::Attach(guest, disk) => {
            let is_free = model.guests.contains_key(&guest) && !model.is_used(disk);
            if is_free {
                model.guests.entry(guest).or_default().insert(disk);
            }
            is_free
        }
        Act::Detach(guest, disk) => model.guests.get_mut(&guest).is_some_and(|disks| disks.remove(&disk)),
        Act::Claim(disk) => !model.is_used(disk) && model.operator.insert(disk),
        Act::Release(disk) => !model.is_used(disk) && model.operator.remove(&disk),
        Act::Restart => true,
    }
}

/// Waits until the API, the ledger and the drivers say what the model does. What a killed guest had takes a moment.
fn agrees(world: &World, model: &Model) -> Result<(), TestCaseError> {
    let expect_guests: BTreeMap<_, BTreeSet<_>> = model
        .guests
        .iter()
        .map(|(&guest, disks)| (name(guest), disks.iter().map(|&number| disk(number).to_string()).collect()))
        .collect();
    let expect_ledger: BTreeMap<_, _> = (0..DISKS)
        .filter(|&number| model.is_used(number) || model.operator.contains(&number))
        .map(|number| (disk(number), (model.operator.contains(&number), model.is_used(number))))
        .collect();
    let expect_drivers: Vec<_> = (0..DISKS)
        .map(|number| {
            Some(if expect_ledger.contains_key(&disk(number)) { "vfio-pci" } else { "nvme" }.to_owned())
        })
        .collect();
    let until = Instant::now() + TIMEOUT;
    loop {
        let (_, guests) = world.call("GET", "/v1/guests", None);
        let devices = |guest: &Value| {
            guest["devices"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|device| device["address"].as_str().unwrap_or("").to_owned())
                .collect()
        };
        let guests: BTreeMap<String, BTreeSet<String>> = guests
            .as_array()
            .into_iter()
            .flatten()
            .map(|guest| (guest["name"].as_str().unwrap_or("").to_owned(), devices(guest)))
            .collect();
        let claims = ledger::claims(&world.host, claim::DEADLINE).expect("the ledger");
        let ledger: BTreeMap<_, _> = claims
            .into_iter()
            .flatten()
            .map(|claim| (claim.entry.target, (claim.entry.persistent, claim.alive)))
            .collect();
        let got = (guests, ledger, world.drivers());
        if got == (expect_guests.clone(), expect_ledger.clone(), expect_drivers.clone()) {
            return Ok(());
        }
        prop_assert!(
            Instant::now() < until,
            "got {got:?}, and not {expect_guests:?} {expect_ledger:?} {expect_drivers:?}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// How many sequences: `VM_DAEMON_SEQUENCES`, or what a test may take.
fn sequences() -> u32 {
    std::env::var("VM_DAEMON_SEQUENCES")
        .ok()
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| crate::sweep::count(1000) as u32)
}

#[test]
fn random_requests_leave_the_ledger_and_the_truth_equal() {
    let mut runner =
        TestRunner::new(Config { cases: sequences(), failure_persistence: None, ..Config::default() });
    let ran = runner.run(&proptest::collection::vec(act(), 1..10), |acts| {
        let (mut world, mut model) = (World::new(), Model::default());
        for act in acts {
            let expected = expect(&mut model, act);
            let done = perform(&mut world, act);
            prop_assert_eq!(done, expected, "{:?}", act);
            agrees(&world, &model)?;
        }
        world.threads.end_all();
        model.guests.clear();
        agrees(&world, &model)
    });
    ran.unwrap_or_else(|error| panic!("{error}"));
}
