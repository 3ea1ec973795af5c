//! Faults of a simulated eGPU, each at its time, as text.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use strum::VariantNames as _;
use thiserror::Error;

use super::fault::{RUNGS, Time};
use super::{Coming, Cure, Ending, SimEgpuFault, SimStep, Times};

/// Faults of a simulated eGPU: one a line, each at a time since the start, or from the start on.
///
/// ```text
/// # The GPU hangs, and no reset of its functions brings it back.
/// reset soft lies
/// at 2s work 10s
/// at 3500ms hang hard
/// at 1min unplug
/// ```
///
/// | words | what happens |
/// | --- | --- |
/// | `plug`, `unplug` | its cable is plugged in or pulled |
/// | `hang [soft\|hard\|reconnect\|unplug]` | the GPU answers nothing until this, or what is stronger, cures it; `soft` by default |
/// | `work [TIME]` | the host gives it work for so long, or until that is ended |
/// | `stall` | work that runs never ends by itself |
/// | `guest takes`, `guest leaves` | a guest claims it and gives it back |
/// | `guest refuses [N]` | it does not give it back when asked |
/// | `temperature CELSIUS` | it is that hot now |
/// | `fan fails\|works`, `sensor fails\|works` | its fan, and what its temperature is read by |
/// | `errors P` | the probability that a bit flips in its link, as in `1e-9`: what that breaks is replayed |
/// | `corrupt P` | the probability that a TLP is broken and slips through |
/// | `tunnel drops\|comes` | somebody else takes its tunnel down or builds it |
/// | `suspend [drops]` | it goes to sleep if nobody uses it, and its link may be lost by that |
/// | `enumerate works\|nothing\|no-gpu\|other\|endless\|no-room [N]` | what comes when its tunnel is built |
/// | `observe\|authorise\|detach\|release\|deauthorise\|settle fails [N]` | a step fails |
/// | `reset soft\|hard\|reconnect works\|fails\|lies [N]` | how a reset ends; one that lies reports success and cures nothing |
/// | `driver sticks TIME` | its driver does not let go of it for so long |
/// | `heal` | all that was broken works again |
///
/// `TIME` is a whole number with `ms`, `s` or `min`. `N` is how many times, always where it is missing; the next line on the same
/// thing comes after these, or replaces what is always so. `#` begins a comment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SimScript {
    faults: Vec<(Duration, SimEgpuFault)>,
}

/// What is wrong with a script.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {what}")]
pub struct SimScriptError {
    /// Which line, from 1.
    pub line: usize,
    /// What is wrong there.
    pub what: String,
}

/// The latest time, a year.
const LATEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// The most lines.
const LINES: usize = 10_000;

impl SimScript {
    /// These faults, each at its time. Those of the same time stay in order.
    pub fn new(mut faults: Vec<(Duration, SimEgpuFault)>) -> Self {
        faults.sort_by_key(|(time, _)| *time);
        Self { faults }
    }

    /// The faults in order of their times.
    pub fn faults(&self) -> &[(Duration, SimEgpuFault)] {
        &self.faults
    }
}

impl fmt::Display for SimScript {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.faults.iter().try_for_each(|(time, fault)| writeln!(f, "at {} {fault}", Time(*time)))
    }
}

impl FromStr for SimScript {
    type Err = SimScriptError;

    fn from_str(text: &str) -> Result<Self, SimScriptError> {
        let mut faults = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let wrong = |what: String| SimScriptError { line: at + 1, what };
            if at >= LINES {
                return Err(wrong(format!("the script is longer than {LINES} lines")));
            }
            let mut words = line.split('#').next().unwrap_or_default().split_whitespace().peekable();
            let mut time = Duration::ZERO;
            if words.next_if_eq(&"at").is_some() {
                time = parse_time(words.next()).map_err(wrong)?;
            } else if words.peek().is_none() {
                continue;
            }
            let words: Vec<&str> = words.collect();
            faults.push((time, fault(&words).map_err(wrong)?));
        }
        Ok(Self::new(faults))
    }
}

impl FromStr for SimEgpuFault {
    type Err = String;

    fn from_str(words: &str) -> Result<Self, String> {
        fault(&words.split_whitespace().collect::<Vec<_>>())
    }
}

/// Words that are no fault say what would be one.
fn fault(words: &[&str]) -> Result<SimEgpuFault, String> {
    Ok(match *words {
        ["plug"] => SimEgpuFault::Plug,
        ["unplug"] => SimEgpuFault::Unplug,
        ["hang"] => SimEgpuFault::Hang(Cure::Soft),
        ["hang", cure] => SimEgpuFault::Hang(one_of(cure, Cure::VARIANTS)?),
        ["work"] => SimEgpuFault::Work(None),
        ["work", time] => SimEgpuFault::Work(Some(parse_time(Some(time))?)),
        ["stall"] => SimEgpuFault::Stall,
        ["guest", "takes"] => SimEgpuFault::GuestTakes,
        ["guest", "leaves"] => SimEgpuFault::GuestLeaves,
        ["guest", "refuses", ref n @ ..] => SimEgpuFault::GuestRefuses(times(n)?),
        ["temperature", celsius] => SimEgpuFault::Temperature(temperature(celsius)?),
        ["fan", works] => SimEgpuFault::Fan(is_works(works)?),
        ["sensor", works] => SimEgpuFault::Sensor(is_works(works)?),
        ["errors", chance] => SimEgpuFault::BitErrors(probability(chance)?),
        ["corrupt", chance] => SimEgpuFault::Corruption(probability(chance)?),
        ["tunnel", "drops"] => SimEgpuFault::TunnelDrops,
        ["tunnel", "comes"] => SimEgpuFault::TunnelComes,
        ["suspend"] => SimEgpuFault::Suspend { drops: false },
        ["suspend", "drops"] => SimEgpuFault::Suspend { drops: true },
        ["enumerate", coming, ref n @ ..] => {
            SimEgpuFault::Enumeration(one_of(coming, Coming::VARIANTS)?, times(n)?)
        }
        ["reset", rung, ending, ref n @ ..] => {
            let found = RUNGS.iter().find(|(name, _)| *name == rung);
            let (_, rung) = found.ok_or_else(|| unknown(rung, &RUNGS.map(|(name, _)| name)))?;
            SimEgpuFault::Reset(*rung, one_of(ending, Ending::VARIANTS)?, times(n)?)
        }
        [step, "fails", ref n @ ..] => SimEgpuFault::Fails(one_of(step, SimStep::VARIANTS)?, times(n)?),
        ["driver", "sticks", time] => SimEgpuFault::DriverSticks(parse_time(Some(time))?),
        ["heal"] => SimEgpuFault::Heal,
        [] => {
            return Err(
                "it says when, and not what; see the documentation of SimScript for what there is".into()
            );
        }
        _ => {
            let said: String = words.join(" ").chars().filter(|char| !char.is_control()).take(60).collect();
            return Err(format!(
                "`{said}` is no fault; see the documentation of SimScript for those that there are"
            ));
        }
    })
}

fn unknown(word: &str, known: &[&str]) -> String {
    let said: String = word.chars().filter(|char| !char.is_control()).take(60).collect();
    format!("`{said}` is none of {}", known.join(", "))
}

fn one_of<T: FromStr>(word: &str, known: &[&str]) -> Result<T, String> {
    word.parse().map_err(|_| unknown(word, known))
}

fn is_works(word: &str) -> Result<bool, String> {
    match word {
        "works" => Ok(true),
        "fails" => Ok(false),
        _ => Err(unknown(word, &["works", "fails"])),
    }
}

fn times(words: &[&str]) -> Result<Times, String> {
    match *words {
        [] => Ok(None),
        [n] => match n.parse() {
            Ok(n) if n > 0 => Ok(Some(n)),
            _ => Err("how many times is a whole number from 1 on, or nothing for always".into()),
        },
        _ => Err("too many words".into()),
    }
}

fn parse_time(word: Option<&str>) -> Result<Duration, String> {
    let wrong = || "a time is a whole number with ms, s or min, up to a year, as in 1500ms".to_owned();
    let word = word.ok_or_else(wrong)?;
    let unit = word.find(|char: char| !char.is_ascii_digit()).ok_or_else(wrong)?;
    let (number, unit) = word.split_at(unit);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let milliseconds: u64 = match unit {
        "ms" => 1,
        "s" => 1000,
        "min" => 60_000,
        _ => return Err(wrong()),
    };
    let time = Duration::from_millis(number.saturating_mul(milliseconds));
    if time <= LATEST { Ok(time) } else { Err(wrong()) }
}

fn temperature(word: &str) -> Result<i32, String> {
    match word.parse::<f64>() {
        Ok(celsius) if (-100.0..=1000.0).contains(&celsius) => Ok((celsius * 1000.0).round() as i32),
        _ => Err("a temperature is from -100 to 1000 °C, as in 95 or 89.5".into()),
    }
}

fn probability(word: &str) -> Result<f64, String> {
    match word.parse::<f64>() {
        Ok(chance) if (0.0..=1.0).contains(&chance) => Ok(chance),
        _ => Err("a probability is from 0 to 1, as in 1e-9".into()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What a script says, in the words that it is printed in; or what is wrong with it.
    fn check(text: &str, wanted: Result<&str, &str>) {
        match (text.parse::<SimScript>(), wanted) {
            (Ok(script), Ok(wanted)) => {
                assert_eq!(script.to_string(), wanted, "{text}");
                assert_eq!(wanted.parse(), Ok(script));
            }
            (Err(error), Err(wanted)) => assert!(error.to_string().contains(wanted), "{text}: {error}"),
            (script, _) => panic!("{text}: {script:?}"),
        }
    }

    #[test]
    fn scripts_say_what_happens() {
        check("", Ok(""));
        check("# nothing\n\n   \n", Ok(""));
        check("at 2s hang\nat 1500ms unplug # now\n", Ok("at 1500ms unplug\nat 2s hang soft\n"));
        check("reset soft fails 2\nreset soft lies", Ok("at 0s reset soft fails 2\nat 0s reset soft lies\n"));
        check("corrupt 1e-6\nerrors 0", Ok("at 0s corrupt 1e-6\nat 0s errors 0e0\n"));
        check(
            "at 3s temperature 95\nat 120s temperature -1.5",
            Ok("at 3s temperature 95\nat 2min temperature -1.5\n"),
        );
        let all = "work\nwork 10s\nstall\nguest takes\nguest leaves\nguest refuses\nguest refuses 3\nfan fails\nsensor works\n\
                   tunnel drops\ntunnel comes\nsuspend\nsuspend drops\nenumerate no-gpu 1\nenumerate endless\nobserve fails\n\
                   authorise fails 7\nreset reconnect works\nhang unplug\ndriver sticks 20s\nplug\nheal\n";
        let timed: String = all.lines().map(|line| format!("at 0s {line}\n")).collect();
        check(all, Ok(&timed));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        check("unplug\nat 5 plug", Err("line 2: a time is a whole number with ms, s or min"));
        check("at", Err("line 1: a time"));
        check("at 1s", Err("it says when, and not what"));
        check("at 9999999999min plug", Err("up to a year"));
        check("hagn", Err("line 1: `hagn` is no fault"));
        check("hang sofd", Err("`sofd` is none of soft, hard, reconnect, unplug"));
        check("reset warm fails", Err("`warm` is none of soft, hard, reconnect"));
        check("reset soft fails 0", Err("a whole number from 1 on"));
        check("reset soft fails 1 2", Err("too many words"));
        check("fan stops", Err("`stops` is none of works, fails"));
        check("walk fails", Err("`walk` is none of observe, authorise"));
        check("corrupt 2", Err("from 0 to 1"));
        check("errors NaN", Err("from 0 to 1"));
        check("temperature 1e9", Err("from -100 to 1000"));
        check(&"plug\n".repeat(LINES + 1), Err("line 10001"));
    }

    proptest! {
        #[test]
        fn whatever_a_script_says_it_is_read(text in "(at |[0-9]{0,20}|ms |s |min |hang|reset |soft|fails|work|# |\n|[ -~é\u{0}-\u{1f}]){0,30}") {
            if let Ok(script) = text.parse::<SimScript>() {
                prop_assert_eq!(script.to_string().parse::<SimScript>(), Ok(script));
            }
        }
    }
}
