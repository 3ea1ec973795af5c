//! Faults of a simulated eGPU, as text.

use std::fmt;
use std::time::Duration;

use crate::egpu::Rung;

/// A fault of a simulated eGPU, or what its users do. One that has nothing to act on, as a hang of what is not plugged in, changes
/// nothing.
///
/// Its text is that of [`SimScript`](super::SimScript).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SimEgpuFault {
    /// Its cable is plugged in. What hung before has lost power since.
    Plug,
    /// Its cable is pulled.
    Unplug,
    /// Its GPU stops answering.
    Hang(Cure),
    /// The host gives it work, for so long or until it is ended. It is woken by that.
    Work(Option<Duration>),
    /// Work that runs never ends by itself.
    Stall,
    /// A guest takes it, unless the host uses it.
    GuestTakes,
    /// The guest gives it back.
    GuestLeaves,
    /// The guest refuses to give it back when it is asked.
    GuestRefuses(Times),
    /// It is this hot, in thousandths of a degree Celsius, and cools or heats up from there.
    Temperature(i32),
    /// Whether its fan turns.
    Fan(bool),
    /// Whether its temperature can be read.
    Sensor(bool),
    /// The probability that a bit flips in its link.
    BitErrors(f64),
    /// The probability that a TLP is broken where no LCRC protects it.
    Corruption(f64),
    /// Somebody else takes its tunnel down.
    TunnelDrops,
    /// Somebody else builds its tunnel.
    TunnelComes,
    /// It goes to sleep, if nobody uses it.
    Suspend {
        /// Its link is lost by that, though the tunnel still reads as there.
        drops: bool,
    },
    /// What comes when its tunnel is built next.
    Enumeration(Coming, Times),
    /// A step fails.
    Fails(SimStep, Times),
    /// How a reset ends.
    Reset(Rung, Ending, Times),
    /// Its driver does not let go of it for so long.
    DriverSticks(Duration),
    /// All that was broken works again. What is pulled stays pulled.
    Heal,
}

/// How many times; `None` for always.
pub type Times = Option<u32>;

/// What a hang is cured by.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::Display, strum::EnumString, strum::VariantNames,
)]
#[strum(serialize_all = "kebab-case")]
pub enum Cure {
    /// A reset of its functions, or any stronger one.
    Soft,
    /// A reset of its bus, or any stronger one.
    Hard,
    /// Its tunnel being taken down and built again.
    Reconnect,
    /// Its cable being pulled.
    Unplug,
}

/// What comes behind a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "kebab-case")]
pub enum Coming {
    /// What is in the enclosure.
    Works,
    /// Nothing.
    Nothing,
    /// Functions, without the GPU's.
    NoGpu,
    /// Functions of another GPU.
    Other,
    /// Functions that come and go without end.
    Endless,
    /// Its functions, without room for their BARs.
    NoRoom,
}

/// How a reset ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "kebab-case")]
pub enum Ending {
    /// It cures what it can cure.
    Works,
    /// It says that it failed, and cures nothing.
    Fails,
    /// It says that it worked, and cures nothing.
    Lies,
}

/// A step that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "kebab-case")]
pub enum SimStep {
    /// Looking at it.
    Observe,
    /// Building its tunnel.
    Authorise,
    /// Detaching it from its guest, also by force.
    Detach,
    /// Releasing its claims.
    Release,
    /// Taking its tunnel down.
    Deauthorise,
    /// Undoing what the ledger has of it.
    Settle,
}

/// What a reset is called.
pub(super) const RUNGS: [(&str, Rung); 3] =
    [("soft", Rung::SoftReset), ("hard", Rung::HardReset), ("reconnect", Rung::Reconnect)];

/// A time with the largest unit that it is a whole number of.
pub(super) struct Time(pub(super) Duration);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let milliseconds = self.0.as_millis();
        match milliseconds {
            0 => f.write_str("0s"),
            _ if milliseconds.is_multiple_of(60_000) => write!(f, "{}min", milliseconds / 60_000),
            _ if milliseconds.is_multiple_of(1000) => write!(f, "{}s", milliseconds / 1000),
            _ => write!(f, "{milliseconds}ms"),
        }
    }
}

impl fmt::Display for SimEgpuFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let works = |works: bool| if works { "works" } else { "fails" };
        let times =
            |f: &mut fmt::Formatter<'_>, times: Times| times.map_or(Ok(()), |times| write!(f, " {times}"));
        match *self {
            Self::Plug => f.write_str("plug"),
            Self::Unplug => f.write_str("unplug"),
            Self::Hang(cure) => write!(f, "hang {cure}"),
            Self::Work(None) => f.write_str("work"),
            Self::Work(Some(time)) => write!(f, "work {}", Time(time)),
            Self::Stall => f.write_str("stall"),
            Self::GuestTakes => f.write_str("guest takes"),
            Self::GuestLeaves => f.write_str("guest leaves"),
            Self::GuestRefuses(n) => f.write_str("guest refuses").and_then(|()| times(f, n)),
            Self::Temperature(celsius) => write!(f, "temperature {}", f64::from(celsius) / 1000.0),
            Self::Fan(on) => write!(f, "fan {}", works(on)),
            Self::Sensor(on) => write!(f, "sensor {}", works(on)),
            Self::BitErrors(chance) => write!(f, "errors {chance:e}"),
            Self::Corruption(chance) => write!(f, "corrupt {chance:e}"),
            Self::TunnelDrops => f.write_str("tunnel drops"),
            Self::TunnelComes => f.write_str("tunnel comes"),
            Self::Suspend { drops } => f.write_str(if drops { "suspend drops" } else { "suspend" }),
            Self::Enumeration(coming, n) => write!(f, "enumerate {coming}").and_then(|()| times(f, n)),
            Self::Fails(step, n) => write!(f, "{step} fails").and_then(|()| times(f, n)),
            Self::Reset(rung, ending, n) => {
                let name = RUNGS.iter().find(|(_, other)| *other == rung).map_or("", |(name, _)| name);
                write!(f, "reset {name} {ending}").and_then(|()| times(f, n))
            }
            Self::DriverSticks(time) => write!(f, "driver sticks {}", Time(time)),
            Self::Heal => f.write_str("heal"),
        }
    }
}
