//! What amdgpu's files say of clocks (Linux `Documentation/gpu/amdgpu/thermal.rst`): `pp_od_clk_voltage`, the table of OverDrive, and
//! `pp_dpm_sclk` and `pp_dpm_mclk`, lists of levels.

/// What `pp_od_clk_voltage` has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overdrive {
    /// Nothing: OverDrive is off.
    Off,
    /// Another way to say clocks, which is this.
    Other(&'static str),
    /// The highest clocks, and in which range they may be.
    Clocks {
        /// Of the core.
        core: Option<Highest>,
        /// Of the memory.
        memory: Option<Highest>,
    },
}

/// MHz of a clock in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Highest {
    /// The highest that it may have.
    pub(super) now: u32,
    /// The least that this may be.
    pub(super) min: u32,
    /// The most that this may be.
    pub(super) max: u32,
}

/// Reads the table.
pub(super) fn overdrive(text: &str) -> Overdrive {
    if text.trim().is_empty() {
        return Overdrive::Off;
    }
    let mut section = "";
    // Of the core and of the memory: the lowest and the highest clock, and the range.
    let (mut lowest, mut highest, mut ranges) = ([None; 2], [None; 2], [None; 2]);
    for line in text.lines().map(str::trim) {
        if line.starts_with("OD_") && line.ends_with(':') {
            section = line;
            if section == "OD_SCLK_OFFSET:" {
                return Overdrive::Other("the core's clock as an offset");
            }
            continue;
        }
        let clock = match section {
            "OD_SCLK:" => 0,
            "OD_MCLK:" => 1,
            "OD_RANGE:" => {
                let mut words = line.split_whitespace();
                let clock = match words.next() {
                    Some("SCLK:") => 0,
                    Some("MCLK:") => 1,
                    _ => continue,
                };
                ranges[clock] = words.next().and_then(mhz).zip(words.next().and_then(mhz));
                continue;
            }
            _ => continue,
        };
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["0:", value] => lowest[clock] = mhz(value),
            ["1:", value] => highest[clock] = mhz(value),
            // Of each level, a voltage too.
            [_, _, _, ..] => return Overdrive::Other("clocks with voltages"),
            _ => {}
        }
    }
    let clock = |index: usize| {
        let (now, (min, max)) = (highest[index]?, ranges[index]?);
        let min = min.max(lowest[index].unwrap_or(0));
        (min <= max).then_some(Highest { now, min, max })
    };
    match (clock(0), clock(1)) {
        (None, None) => Overdrive::Other("no highest clock with its range"),
        (core, memory) => Overdrive::Clocks { core, memory },
    }
}

/// Levels of a clock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Levels {
    /// Number and MHz of each, as they are listed.
    pub(super) all: Vec<(u32, u32)>,
    /// MHz of the one that it is at.
    pub(super) now: Option<u32>,
}

impl Levels {
    /// Reads a list of lines as `1: 2394Mhz *`. A clock that is asleep is at a level `S`.
    pub(super) fn parse(text: &str) -> Self {
        /// More than the driver takes in a mask.
        const MOST: u32 = 32;
        let mut levels = Self::default();
        for line in text.lines() {
            let Some((number, rest)) = line.trim().split_once(':') else { continue };
            let mut words = rest.split_whitespace();
            let Some(mhz) = words.next().and_then(mhz) else { continue };
            if words.next() == Some("*") {
                levels.now = Some(mhz);
            }
            if let Some(number) = number.parse().ok().filter(|&number| number < MOST) {
                levels.all.push((number, mhz));
            }
        }
        levels
    }

    /// MHz of all, in ascending order.
    pub(super) fn mhz(&self) -> Vec<u32> {
        let mut mhz: Vec<_> = self.all.iter().map(|&(_, mhz)| mhz).collect();
        mhz.sort_unstable();
        mhz.dedup();
        mhz
    }

    /// What enables those of at most so many MHz.
    pub(super) fn up_to(&self, most: u32) -> String {
        let numbers = self.all.iter().filter(|&&(_, mhz)| mhz <= most).map(|(number, _)| number.to_string());
        numbers.collect::<Vec<_>>().join(" ")
    }
}

/// A number as in `500Mhz`.
fn mhz(text: &str) -> Option<u32> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    text[digits..].eq_ignore_ascii_case("mhz").then(|| text[..digits].parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_several_generations() {
        let check = |text: &str, expect: Overdrive| assert_eq!(overdrive(text), expect, "{text}");
        let highest = |now, min, max| Some(Highest { now, min, max });
        check(
            "OD_SCLK:\n0: 500Mhz\n1: 2500Mhz\nOD_MCLK:\n0: 97Mhz\n1: 1249MHz\nOD_VDDGFX_OFFSET:\n0mV\nOD_RANGE:\n\
             SCLK:     500Mhz       3000Mhz\nMCLK:      97Mhz       1500Mhz\nVDDGFX_OFFSET: -450mv 0mv\n",
            Overdrive::Clocks { core: highest(2500, 500, 3000), memory: highest(1249, 97, 1500) },
        );
        // Of the memory only the highest, and the core may not be set below its lowest.
        check(
            "OD_SCLK:\n0: 800Mhz\n1: 2100Mhz\nOD_MCLK:\n1: 875MHz\nOD_VDDC_CURVE:\n0: 800MHz 712mV\n1: 1450MHz 799mV\n\
             OD_RANGE:\nSCLK: 300Mhz 2150Mhz\nMCLK: 625Mhz 950Mhz\n",
            Overdrive::Clocks { core: highest(2100, 800, 2150), memory: highest(875, 625, 950) },
        );
        check(
            "OD_SCLK:\n0: 200Mhz\n1: 1700Mhz\nOD_RANGE:\nSCLK: 200Mhz 1700Mhz\n",
            Overdrive::Clocks { core: highest(1700, 200, 1700), memory: None },
        );
        let old =
            "OD_SCLK:\n0:        852Mhz        800mV\n1: 991Mhz 900mV\nOD_RANGE:\nSCLK: 852MHz 2400MHz\n";
        check(old, Overdrive::Other("clocks with voltages"));
        let offset =
            "OD_SCLK_OFFSET:\n0Mhz\nOD_MCLK:\n0: 97Mhz\n1: 1259MHz\nOD_RANGE:\nMCLK: 97Mhz 1500Mhz\n";
        check(offset, Overdrive::Other("the core's clock as an offset"));
        check("", Overdrive::Off);
        check("\n", Overdrive::Off);
        // No number, one that is none, a range that begins behind its end.
        let none = Overdrive::Other("no highest clock with its range");
        for text in [
            "\u{fffd}\u{fffd}",
            "OD_SCLK:\n1: 99999999999Mhz\nOD_RANGE:\nSCLK: 1Mhz 2Mhz",
            "OD_SCLK:\n1: -5Mhz\nOD_RANGE:\nSCLK: 1Mhz 2Mhz",
            "OD_SCLK:\n1: 1000Mhz\nOD_RANGE:\nSCLK: 2000Mhz 500Mhz",
            "OD_SCLK:\n1: 1000Mhz\n",
            "OD_SCLK:\n1:\n1: Mhz\n: 5Mhz\nOD_RANGE:\nSCLK:\n",
        ] {
            check(text, none);
        }
    }

    #[test]
    fn levels_and_what_enables_them() {
        let levels = Levels::parse("S: 19Mhz *\n0: 615Mhz\n1: 800Mhz\n2: 888Mhz\n");
        assert_eq!((levels.now, levels.mhz()), (Some(19), vec![615, 800, 888]));
        assert_eq!(
            (levels.up_to(800), levels.up_to(9999), levels.up_to(1)),
            ("0 1".into(), "0 1 2".into(), String::new())
        );
        let odd =
            Levels::parse("0: 5000000000Mhz\n1 9\n: *\n40: 7Mhz\n-1: 3Mhz\n3: 9Mhz *\n\u{e9}: \u{e9}Mhz");
        assert_eq!(odd, Levels { all: vec![(3, 9)], now: Some(9) });
    }
}
