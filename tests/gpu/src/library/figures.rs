//! How fast the functions of the library are, as [`Function::call`](vm_kernels::call::Function::call) launches them, beside a device
//! copy of as many bytes, PyTorch, and QuACK and FlashInfer, if their modules are there.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, OnceLock};

use anyhow::Context;
use vm_accel::Accelerator as _;
use vm_passthrough::accelerator::resources;

use super::measure::{Bench, Times};
use super::work::{Goal, Group, Work, groups};
use crate::gpu::Gpu;
use crate::peer::{self, Answer};
use crate::table::{Aim, Figure, Report, Sample};
use crate::{Arguments, Test};

/// By key: the names of peers, and what they take.
type Peers = HashMap<String, Vec<(String, Answer)>>;

/// What peers take, which is measured once for all works.
struct Beside {
    works: Vec<String>,
    peers: OnceLock<Result<Peers, String>>,
}

impl Beside {
    fn peers(&self) -> Result<&Peers, &str> {
        let measure = || peer::run(concat!(include_str!("others.py"), include_str!("peers.py")), &self.works);
        self.peers.get_or_init(measure).as_ref().map_err(String::as_str)
    }
}

/// The tests of this section, one for each function and type.
pub(crate) fn tests(arguments: &Arguments) -> Vec<Test> {
    let groups: Vec<Group> = groups().into_iter().filter(|group| arguments.selects(&group.name)).collect();
    let works = groups.iter().flat_map(|group| &group.works);
    let works = works.map(|work| format!("{} {}", work.key, u8::from(work.compiled))).collect();
    let beside = Arc::new(Beside { works, peers: OnceLock::new() });
    let of = |group: Group| {
        let beside = Arc::clone(&beside);
        Test::new(group.name.clone(), move |gpu, report| run(gpu, &group, &beside, report))
    };
    groups.into_iter().map(of).collect()
}

fn run(gpu: &Gpu, group: &Group, beside: &Beside, report: &mut Report) -> anyhow::Result<()> {
    let resources = resources(gpu.accelerator.info());
    // First: it takes the device for itself.
    let peers = beside.peers();
    let bench = Bench::new(gpu, &group.works, &resources)?;
    let mut without = BTreeSet::new();
    for work in &group.works {
        let times = bench.time(work, &resources).with_context(|| work.to_string())?;
        let empty = Vec::new();
        let of_work = peers.ok().and_then(|peers| peers.get(&work.key)).unwrap_or(&empty);
        figures(work, &times, of_work, report);
        let reasons = of_work.iter().filter_map(|(name, answer)| Some((name, answer.as_ref().err()?)));
        without.extend(reasons.map(|(name, reason)| format!("without {name}: {reason}")));
    }
    without.into_iter().for_each(|line| report.note(line));
    if let Err(reason) = peers {
        report.note(format!("without PyTorch: {reason}"));
    }
    bench.end()
}

/// The figures of a function: beside a copy, beside each library's fastest way, and as a guest's.
fn figures(work: &Work, times: &Times, peers: &[(String, Answer)], report: &mut Report) {
    let rate = |seconds: &[f64]| {
        Sample::of(seconds.iter().map(|seconds| work.bytes as f64 / seconds / 1e12).collect())
    };
    let micro = |seconds: &[f64]| Sample::of(seconds.iter().map(|seconds| seconds * 1e6).collect());
    let mut figure =
        |name: String, unit: &str, ours: Sample, peer: Option<(String, Sample)>, aim: Option<Aim>| {
            report.figure(Figure { name, unit: unit.into(), ours, peer, aim });
        };
    let own = rate(&times.own);
    let at_least = |part| Some(Aim::RatioAtLeast(part));
    let copy = ("device copy".to_owned(), rate(&times.copy));
    let aim = match work.goal {
        Goal::OfCopy(part) => at_least(part),
        Goal::Milliseconds(_) | Goal::Peer => None,
    };
    figure(work.to_string(), "TB/s", own.clone(), Some(copy), aim);
    if let Goal::Milliseconds(most) = work.goal {
        figure(work.to_string(), "µs", micro(&times.own), None, Some(Aim::AtMost(most * 1e3)));
    }
    let mut fastest = BTreeMap::new();
    for (name, answer) in peers {
        let Ok(seconds) = answer else { continue };
        let (library, peer) = (name.split(' ').next(), (name.clone(), rate(seconds)));
        let best = fastest.entry(library).or_insert_with(|| peer.clone());
        if peer.1.median > best.1.median {
            *best = peer;
        }
    }
    for peer in fastest.into_values() {
        figure(work.to_string(), "TB/s", own.clone(), Some(peer), at_least(1.0));
    }
    let trusted = ("the host's own".to_owned(), micro(&times.own));
    let aim = Some(Aim::RatioAtMost(1.03));
    figure(format!("{work}, as a guest's"), "µs", micro(&times.guest), Some(trusted), aim);
}
