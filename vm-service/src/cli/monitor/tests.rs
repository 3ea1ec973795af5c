//! What a board makes of what was seen, and what a screen shows of it.

use std::sync::LazyLock;
use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use vm_passthrough::pci::{AerCount, AerCounters, Link};
use vm_passthrough::sim::{SimFunction, SimHost};
use vm_passthrough::telemetry::{Clock, GpuLink, Source, Telemetry, Throttle};
use vm_passthrough::{Host, PciAddress};

use super::*;
use crate::devices::gpus::{self, Which};

static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The moment so many milliseconds after the first.
fn at(milliseconds: u64) -> Instant {
    *BEGIN + Duration::from_millis(milliseconds)
}

fn address(text: &str) -> PciAddress {
    text.parse().expect("an address")
}

/// A host with an AMD GPU in an enclosure, at this bus, and an NVIDIA GPU of its own.
fn sim(bus: u8) -> SimHost {
    let sim = SimHost::new().expect("a host");
    sim.write("proc/sys/kernel/osrelease", "6.13.0\n").expect("a release");
    let add = |function: SimFunction| drop(sim.add(&function).expect("a function"));
    add(SimFunction::root_port(address("00:07.0")));
    let amd = SimFunction::new(address(&format!("{bus:02x}:00.0")), 0x1002, 0x744c, 0x03_0000).express(0);
    add(amd.group(9).link(2_500, 1).driver("amdgpu").below(address("00:07.0")));
    sim.add_amdgpu(address(&format!("{bus:02x}:00.0"))).expect("files");
    sim.set(address(&format!("{bus:02x}:00.0")), "removable", "removable\n").expect("written");
    add(SimFunction::gpu(address("01:00.0")).driver("nvidia"));
    sim.add_domain(0, None, &[("security", "user\n")]).expect("a domain");
    let router = [
        ("authorized", "1\n"),
        ("vendor_name", "Razer\n"),
        ("device_name", "Core X\n"),
        ("unique_id", "d2030000-00a0-751e-a3f4-c0e5ae7b0d30\n"),
        ("rx_speed", "20.0 Gb/s\n"),
        ("rx_lanes", "2\n"),
        ("tx_speed", "20.0 Gb/s\n"),
        ("tx_lanes", "2\n"),
    ];
    sim.add_router("0-1".parse().expect("a route"), &router).expect("a router");
    sim
}

fn find(host: &Host) -> Vec<Gpu> {
    gpus::find(host, Which::All).unwrap_or_else(|failure| panic!("{}", failure.message))
}

/// What a GPU at work tells.
fn told() -> Telemetry {
    Telemetry {
        source: Source::Nvml,
        temperature: Some(52.0),
        hot_spot: Some(63.4),
        power: Some(87.0),
        power_limit: Some(303.0),
        fan_percent: Some(25),
        core_clock: Clock { now: Some(1725), max: Some(2500) },
        performance_state: Some("P2".into()),
        busy: Some(41),
        memory_used: Some(3 << 30),
        memory_total: Some(24 << 30),
        link: Some(pcie(16)),
        errors: Some(AerCounters::default()),
        replays: Some(0),
        throttle: Some(Vec::new()),
        ..Telemetry::default()
    }
}

fn pcie(width: u8) -> GpuLink {
    let speed = if width == 0 { 0 } else { 16_000 };
    GpuLink::Pcie(Link { speed, width, max_speed: 16_000, max_width: 16 })
}

fn errors(correctable: u64, fatal: u64) -> Option<AerCounters> {
    let count = |total| AerCount { total, kinds: Vec::new() };
    Some(AerCounters { correctable: count(correctable), fatal: count(fatal), ..AerCounters::default() })
}

/// A board with one GPU that was seen at these moments.
fn board(gpu: &Gpu, seen: Vec<(u64, Answer)>) -> Board {
    let mut board = Board::new();
    for (moment, answer) in seen {
        board.observe(Observation { at: at(moment), gpus: vec![(gpu.clone(), answer)] });
    }
    board
}

fn answer(moment: u64, told: Telemetry) -> (u64, Answer) {
    (moment, Answer::Told(at(moment), Box::new(told)))
}

#[test]
fn alarms_and_rates() {
    let sim = sim(9);
    let gpu = find(&sim.plain_host()).remove(1);
    let check = |seen: Vec<(u64, Answer)>, alarms: &[&str], correctable: Option<f64>| {
        let board = board(&gpu, seen.clone());
        let [panel] = board.panels() else { panic!("{board:?}") };
        assert_eq!(
            (panel.alarms(), panel.rates().correctable),
            (alarms.iter().map(ToString::to_string).collect(), correctable),
            "{seen:?}"
        );
        assert_eq!(panel.sample().alarms, panel.alarms());
    };
    let with = |change: fn(&mut Telemetry)| {
        let mut told = told();
        change(&mut told);
        told
    };
    let count = |correctable, fatal| Telemetry { errors: errors(correctable, fatal), ..told() };
    check(vec![answer(0, told())], &[], None);
    check(vec![answer(0, told()), answer(500, told())], &[], Some(0.0));
    // 90 °C is not over 90 °C; a hot spot counts where there is no other.
    check(vec![answer(0, with(|told| told.temperature = Some(90.0)))], &[], None);
    check(vec![answer(0, with(|told| told.temperature = Some(90.6)))], &["91 °C, more than 90 °C"], None);
    check(vec![answer(0, with(|told| told.hot_spot = Some(104.0)))], &[], None);
    let hot_spot = with(|told| (told.temperature, told.hot_spot) = (None, Some(104.0)));
    check(vec![answer(0, hot_spot)], &["104 °C, more than 90 °C"], None);
    // A link that was there, and one that never was.
    let down = with(|told| told.link = Some(pcie(0)));
    check(vec![answer(0, down.clone())], &["the link is down"], None);
    check(vec![answer(0, told()), answer(500, down.clone())], &["the link was lost"], Some(0.0));
    check(vec![answer(0, told()), answer(500, down), answer(1000, told())], &[], Some(0.0));
    check(vec![answer(0, told()), answer(500, with(|told| told.link = None))], &[], Some(0.0));
    // Errors: by the time that has passed, and told for a while. What was before is no rise.
    check(vec![answer(0, count(7, 0))], &[], None);
    let rise = "errors on PCI Express rise: 1 fatal, 3 correctable";
    check(vec![answer(0, count(7, 0)), answer(250, count(10, 1))], &[rise], Some(12.0));
    let later = |after: u64| {
        vec![answer(0, count(7, 0)), answer(250, count(10, 1)), answer(250 + after, count(10, 1))]
    };
    check(later(29_999), &[rise], Some(0.0));
    check(later(30_000), &[], Some(0.0));
    // Counters that begin again, or are read twice at once, have no rate.
    check(vec![answer(0, count(7, 0)), answer(500, count(2, 0))], &[], None);
    check(vec![answer(0, count(u64::MAX, 0)), answer(500, count(0, 0))], &[], None);
    let rise = "errors on PCI Express rise: 2 correctable";
    check(vec![answer(0, count(7, 0)), answer(0, count(9, 0))], &[rise], None);
    check(vec![answer(500, count(7, 0)), answer(0, count(9, 0))], &[rise], None);
    let none = with(|told| told.errors = None);
    check(vec![answer(0, count(7, 0)), answer(500, none.clone()), answer(1000, count(9, 0))], &[], None);
    // A driver that takes a while is no alarm at once.
    let waiting = |moment| (moment, Answer::Waiting(at(500)));
    check(vec![answer(0, told()), waiting(2_400)], &[], None);
    check(vec![answer(0, told()), waiting(2_500)], &["its driver has not answered for 2 s"], None);
    // One that comes back begins anew.
    let gone = (500, Answer::Gone);
    check(vec![answer(0, count(7, 0)), gone.clone()], &["the GPU is gone"], None);
    check(vec![answer(0, count(7, 0)), gone.clone(), answer(1000, count(9, 0))], &[], None);
    check(
        vec![answer(0, count(7, 0)), gone, answer(1000, count(1, 0)), answer(1500, count(2, 0))],
        &["errors on PCI Express rise: 1 correctable"],
        Some(2.0),
    );
}

#[test]
fn a_gpu_that_comes_back_elsewhere_keeps_its_panel() {
    let mut board = Board::new();
    let mut see = |moment, sim: &SimHost, is_there: bool| {
        let gpus = find(&sim.plain_host()).into_iter().filter(|gpu| is_there || gpu.tunnel.is_none());
        let gpus = gpus.map(|gpu| (gpu, Answer::Told(at(moment), Box::new(told())))).collect();
        board.observe(Observation { at: at(moment), gpus });
        let state = |panel: &Panel| (panel.gpu().address().to_string(), panel.state(), panel.busy.max());
        board.panels().iter().map(state).collect::<Vec<_>>()
    };
    let (first, second) = (sim(9), sim(10));
    let own = ("0000:01:00.0".to_owned(), State::There, 41);
    assert_eq!(see(0, &first, true), [("0000:09:00.0".to_owned(), State::There, 41), own.clone()]);
    let gone = State::Gone(at(500));
    assert_eq!(see(500, &first, false), [("0000:09:00.0".to_owned(), gone, 41), own.clone()]);
    assert_eq!(see(1000, &first, false), [("0000:09:00.0".to_owned(), gone, 41), own.clone()]);
    assert_eq!(see(1500, &second, true), [("0000:0a:00.0".to_owned(), State::There, 41), own]);
}

/// What a screen of this size shows.
fn screen(board: &Board, view: &View, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
    terminal.draw(|frame| draw(frame, board, view)).expect("drawn");
    let buffer = terminal.backend().buffer().clone();
    let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
    (0..height).map(row).collect::<Vec<_>>().join("\n")
}

#[test]
fn screens_show_what_there_is_room_for() {
    let sim = sim(9);
    let gpus = find(&sim.plain_host());
    let view = View { interval: "500 ms".into(), ..View::default() };
    let hot = Telemetry { temperature: Some(93.0), throttle: Some(vec![Throttle::Temperature]), ..told() };
    let two = |first: Answer, second: Answer| {
        let mut board = Board::new();
        let gpus = gpus.iter().cloned().zip([first, second]).collect();
        board.observe(Observation { at: at(0), gpus });
        board
    };
    let fine = || Answer::Told(at(0), Box::new(told()));
    let check = |board: &Board, view: &View, width, height, parts: &[&str], absent: &[&str]| {
        let shown = screen(board, view, width, height);
        for part in parts {
            assert!(shown.contains(part), "no `{part}` in {width} x {height}:\n{shown}");
        }
        for part in absent {
            assert!(!shown.contains(part), "`{part}` in {width} x {height}:\n{shown}");
        }
    };
    let board = two(Answer::Told(at(0), Box::new(hot)), fine());
    let all = [
        "0000:09:00.0 amdgpu in Razer Core X (inferred): Advanced Micro Devices",
        "0000:01:00.0 nvidia: NVIDIA",
        "93 °C (hot spot 63), 87 of 303 W, 41 % busy, 3.0 of 24.0 GiB",
        "core 1725 of 2500 MHz, state P2, fan 25 %, held down by temperature",
        "link 16 GT/s x16, errors 0 correctable, 0 nonfatal, 0 fatal, 0 replays",
        "93 °C, more than 90 °C",
        "busy  ",
        "memory  ",
        "▇",
        "q: quit | every 500 ms",
    ];
    check(&board, &view, 110, 21, &all, &["more, up and down", "simulated", "gone"]);
    // Without the graphs, a line for each, and what does not fit.
    check(&board, &view, 110, 20, &all[..6], &["▇"]);
    check(&board, &view, 110, 13, &all[..6], &["▇"]);
    let lines = ["0000:09:00.0 93 °C, more than 90 °C", "0000:01:00.0 52 °C 87 W 41 %", "q: quit"];
    check(&board, &view, 110, 12, &lines, &["core"]);
    check(&board, &view, 110, 3, &lines, &["core"]);
    check(&board, &view, 110, 2, &["0000:09:00.0", "1 more, up and down"], &["0000:01:00.0"]);
    let below = View { first: 1, ..view.clone() };
    check(&board, &below, 110, 2, &["0000:01:00.0", "1 more"], &["0000:09:00.0"]);
    check(&board, &View { first: 99, ..view.clone() }, 110, 2, &["0000:01:00.0"], &[]);
    check(&board, &view, 110, 1, &["0000:09:00.0"], &["quit"]);
    check(&board, &view, 12, 2, &["0000:09:00.0", " q: quit"], &[]);
    // A GPU that is gone, one whose driver does not answer, and one that nobody can ask.
    let board = two(Answer::Gone, Answer::Waiting(at(0)));
    check(&board, &view, 90, 21, &["the GPU is gone", "0000:09:00.0", "0000:01:00.0"], &["°C"]);
    let unknown =
        Telemetry { source: Source::None("no driver has it\u{1b}[2J".into()), ..Telemetry::default() };
    let board = two(fine(), Answer::Told(at(0), Box::new(unknown)));
    check(&board, &view, 110, 21, &["52 °C", "no driver has it\u{fffd}[2J"], &["\u{1b}"]);
    let simulated = View { is_simulated: true, ..view.clone() };
    check(&Board::new(), &simulated, 60, 5, &["no GPU is there", "simulated host"], &[]);
    // No size is too small, or too large.
    for width in (1..=20).chain([80, 500]) {
        for height in (1..=20).chain([60, 200]) {
            screen(&board, &view, width, height);
        }
    }
}

#[test]
fn a_sampler_sees_what_comes_and_goes() {
    let sim = sim(9);
    let host = sim.plain_host();
    let mut sampler =
        Sampler::new(&host, Which::Tunnelled).unwrap_or_else(|failure| panic!("{}", failure.message));
    let minute = Duration::from_secs(60);
    let mut look = || -> Vec<(String, Option<u32>, Option<String>)> {
        let seen = sampler.sample(minute).gpus.into_iter();
        let one = |(gpu, answer): (Gpu, Answer)| match answer {
            Answer::Told(_, told) => (gpu.address().to_string(), told.busy, gpu.function.driver),
            _ => (gpu.address().to_string(), None, None),
        };
        seen.map(one).collect()
    };
    let gpu = |busy, driver: &str| vec![("0000:09:00.0".to_owned(), busy, Some(driver.to_owned()))];
    assert_eq!(look(), gpu(Some(41), "amdgpu"));
    sim.set_driver(address("09:00.0"), Some("vfio-pci")).expect("bound");
    assert_eq!(look(), gpu(None, "vfio-pci"));
    sim.set_driver(address("09:00.0"), Some("amdgpu")).expect("bound");
    sim.remove(address("09:00.0")).expect("removed");
    assert_eq!(look(), []);
    let amd = SimFunction::new(address("0a:00.0"), 0x1002, 0x744c, 0x03_0000).express(0).group(9);
    sim.add(&amd.driver("amdgpu").below(address("00:07.0"))).expect("a function");
    sim.add_amdgpu(address("0a:00.0")).expect("files");
    sim.set(address("0a:00.0"), "removable", "removable\n").expect("written");
    let back = look();
    let [(address, ..)] = &back[..] else { panic!("{back:?}") };
    assert_eq!(address, "0000:0a:00.0");
}
