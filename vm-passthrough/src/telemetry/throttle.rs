//! What holds the clocks of a GPU down.

/// What holds clocks down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "kebab-case")]
pub enum Throttle {
    /// It would draw more than its power limit.
    PowerLimit,
    /// It would draw more current than its supply gives.
    Current,
    /// It is too hot.
    Temperature,
    /// A signal from outside, as of its power supply, has slowed it down.
    Hardware,
    /// A setting: clocks that somebody has locked or chosen.
    Setting,
    /// Another reason.
    Other,
}

impl Throttle {
    /// Of the bits of NVML (`nvmlClocksThrottleReasons`). That nothing runs is no reason.
    #[cfg(feature = "cuda")]
    pub(super) fn of_nvml(bits: u64) -> Vec<Self> {
        const IDLE: u64 = 0x1;
        Self::of(
            bits & !IDLE,
            &[
                (0x4, Self::PowerLimit),
                // By software, and by hardware.
                (0x20 | 0x40, Self::Temperature),
                // Any slowdown by hardware, and by its power brake.
                (0x8 | 0x80, Self::Hardware),
                // Clocks of applications, and of a display.
                (0x2 | 0x100, Self::Setting),
            ],
        )
    }

    /// Of the bits that are the same for all of AMD's GPUs (`SMU_THROTTLER_*` in Linux
    /// `drivers/gpu/drm/amd/pm/swsmu/inc/amdgpu_smu.h`).
    pub(super) fn of_amd(bits: u64) -> Vec<Self> {
        Self::of(
            bits,
            &[
                (0xffff, Self::PowerLimit),
                (0xffff << 16, Self::Current),
                (0x3fff << 32, Self::Temperature),
                // PROCHOT.
                (0x3 << 46, Self::Hardware),
            ],
        )
    }

    fn of(bits: u64, reasons: &[(u64, Self)]) -> Vec<Self> {
        let known = reasons.iter().fold(0, |known, (mask, _)| known | mask);
        let found = reasons.iter().filter(|(mask, _)| bits & mask != 0).map(|(_, reason)| *reason);
        found.chain((bits & !known != 0).then_some(Self::Other)).collect()
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    #[test]
    fn bits_of_nvml() {
        let check = |bits, expect: &[Throttle]| assert_eq!(Throttle::of_nvml(bits), expect, "{bits:#x}");
        check(0, &[]);
        check(1, &[]);
        check(0x5, &[Throttle::PowerLimit]);
        check(0x48, &[Throttle::Temperature, Throttle::Hardware]);
        check(0x102, &[Throttle::Setting]);
        check(0x10, &[Throttle::Other]);
    }
}
