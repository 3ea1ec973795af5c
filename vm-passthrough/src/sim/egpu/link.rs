//! PCI Express in a tunnel of USB4: how long bytes take, and what becomes of them when bits flip.
//!
//! ```text
//! bytes ─▶ TLPs of up to `payload` bytes ─▶ packets of the tunnel ─▶ lanes (bits flip) ─▶ LCRC ─▶ bytes
//!              ▲                                                                    │ wrong
//!              └── replay, from the first that was wrong; the fourth that fails retrains the link
//! ```
//!
//! Each TLP is not carried one by one: errors are rare, and the distance to the next one is drawn at once.

use std::time::Duration;

use thiserror::Error;

use super::SplitMix64;
use crate::usb4::tunnelled_bytes;

/// How many replays without progress make the link be retrained: `REPLAY_NUM`, of two bits, begins anew (PCI Express Base 6.0,
/// 3.6.2.1).
const REPLAYS: u32 = 4;
/// How long a retraining takes, in the model.
const RETRAINING: Duration = Duration::from_millis(1);
/// After how many retrainings without progress the link is down, in the model.
const RETRAININGS: u32 = 4;
const PICOSECONDS: u64 = 1_000_000_000_000;

/// The link of an enclosure, as it is modelled.
#[derive(Clone, Debug, PartialEq)]
pub struct SimLink {
    /// What the tunnel may use, in Mbit/s.
    pub rate: u32,
    /// Whether both directions draw on one budget, so that bytes there slow bytes back. The lanes of a real link are for one
    /// direction each: `false` is closer to them, `true` never promises too much.
    pub is_shared: bool,
    /// Links between the host and the enclosure.
    pub hops: u8,
    /// How long a packet takes for each of them.
    pub hop_latency: Duration,
    /// The most payload of a TLP in bytes, 128 or 256 (Max_Payload_Size).
    pub payload: u16,
    /// How many TLPs may be under way before the receiver has to give credits back, which takes a round trip.
    pub credits: u16,
    /// The probability that a bit flips on the way. What that breaks is replayed.
    pub bit_errors: f64,
    /// The probability that a TLP is broken where no LCRC protects it, as in the buffer of a router: it slips through.
    pub corruption: f64,
}

impl Default for SimLink {
    /// 32 Gb/s of a 40 Gb/s link, one cable, no errors.
    fn default() -> Self {
        Self {
            rate: 32_000,
            is_shared: true,
            hops: 1,
            hop_latency: Duration::from_nanos(500),
            payload: 128,
            credits: 64,
            bit_errors: 0.0,
            corruption: 0.0,
        }
    }
}

/// What bytes met on their way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// How long they took.
    pub duration: Duration,
    /// TLPs, without those that were sent again.
    pub packets: u64,
    /// Replays after a wrong LCRC.
    pub replays: u64,
    /// Retrainings of the link.
    pub retrainings: u64,
    /// TLPs that came with a wrong payload and a right LCRC.
    pub corrupted: u64,
}

/// The link went down: it was retrained again and again without a TLP getting through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("its link went down after {retrainings} retrainings")]
pub struct LinkDown {
    /// How long that took.
    pub duration: Duration,
    /// How often it was retrained.
    pub retrainings: u64,
}

impl SimLink {
    /// From the host to the enclosure and back.
    pub fn round_trip(&self) -> Duration {
        self.hop_latency * u32::from(self.hops) * 2
    }

    fn serialised(&self, bytes: u64) -> u64 {
        // In picoseconds; a rate of nothing is one that is as good as nothing.
        let rate = u128::from(self.rate.max(1)) * 1_000_000;
        u64::try_from(u128::from(bytes) * 8 * u128::from(PICOSECONDS) / rate).unwrap_or(u64::MAX)
    }

    /// Carries `data` one way; what slips through is in it afterwards.
    ///
    /// # Errors
    /// When the link goes down.
    pub fn carry(&self, data: &mut [u8], random: &mut SplitMix64) -> Result<Carried, LinkDown> {
        let payload = usize::from(self.payload.max(1));
        let len = data.len() as u64;
        let packets = len.div_ceil(payload as u64).max(1);
        let full = tunnelled_bytes(payload as u64);
        let last = tunnelled_bytes(len - (packets - 1) * payload as u64);
        let round_trip = picoseconds(self.round_trip());
        // Without credits nothing is sent, however fast the lanes are.
        let pace = self.serialised(full).max(round_trip / u64::from(self.credits.max(1)));
        let mut time = round_trip / 2;
        time = time.saturating_add(pace.saturating_mul(packets - 1)).saturating_add(self.serialised(last));

        let (mut replays, mut retrainings) = (0_u64, 0_u64);
        let (mut done, mut in_vain, mut retrained) = (0_u64, 0, 0);
        loop {
            let through = random.gap(self.bit_errors) / (full * 8);
            done = done.saturating_add(through);
            if done >= packets {
                break;
            }
            if through > 0 {
                (in_vain, retrained) = (0, 0);
            }
            // Its Nak has to come back, and all that was sent since is sent again.
            replays += 1;
            in_vain += 1;
            time = time.saturating_add(round_trip).saturating_add(pace);
            if in_vain == REPLAYS {
                (in_vain, retrained) = (0, retrained + 1);
                retrainings += 1;
                time = time.saturating_add(picoseconds(RETRAINING));
            }
            if retrained == RETRAININGS {
                return Err(LinkDown { duration: duration(time), retrainings });
            }
        }
        let corrupted = self.corrupt(data, payload, packets, random);
        Ok(Carried { duration: duration(time), packets, replays, retrainings, corrupted })
    }

    /// Flips a bit in the payload of each TLP that is corrupted, and says how many were.
    fn corrupt(&self, data: &mut [u8], payload: usize, packets: u64, random: &mut SplitMix64) -> u64 {
        let mut corrupted = 0;
        let mut at = random.gap(self.corruption);
        while at < packets && !data.is_empty() {
            let bytes = data.chunks_mut(payload).nth(usize::try_from(at).unwrap_or(usize::MAX));
            let bytes = bytes.unwrap_or_default();
            let bit = random.below(bytes.len() as u64 * 8);
            if let Some(byte) = bytes.get_mut((bit / 8) as usize) {
                *byte ^= 1 << (bit % 8);
                corrupted += 1;
            }
            at = at.saturating_add(random.gap(self.corruption)).saturating_add(1);
        }
        corrupted
    }

    /// Carries bytes both ways at once.
    ///
    /// # Errors
    /// When the link goes down.
    pub fn exchange(
        &self,
        there: &mut [u8],
        back: &mut [u8],
        random: &mut SplitMix64,
    ) -> Result<Carried, LinkDown> {
        if back.is_empty() {
            return self.carry(there, random);
        }
        let back = self.carry(back, random)?;
        if there.is_empty() {
            return Ok(back);
        }
        let there = self.carry(there, random)?;
        let duration = match self.is_shared {
            true => there.duration.saturating_add(back.duration),
            false => there.duration.max(back.duration),
        };
        Ok(Carried {
            duration,
            packets: there.packets + back.packets,
            replays: there.replays + back.replays,
            retrainings: there.retrainings + back.retrainings,
            corrupted: there.corrupted + back.corrupted,
        })
    }
}

fn picoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().saturating_mul(1000)).unwrap_or(u64::MAX)
}

/// Rounded up, so that nothing takes no time.
fn duration(picoseconds: u64) -> Duration {
    Duration::from_nanos(picoseconds.div_ceil(1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn carried(link: &SimLink, len: usize) -> Carried {
        link.carry(&mut vec![0; len], &mut SplitMix64::new(1)).unwrap()
    }

    /// How many Mbit/s of payload 64 MiB get, to the nearest.
    fn check(link: &SimLink, wanted: u64) {
        let carried = carried(link, 64 * MIB);
        let rate = 64.0 * MIB as f64 * 8.0 / carried.duration.as_secs_f64() / 1e6;
        assert_eq!(rate.round() as u64, wanted, "{link:?} {carried:?}");
    }

    #[test]
    fn bytes_take_as_long_as_their_packets() {
        let link = SimLink::default();
        // 128 of 128 + 24 + 4 bytes; 256 of 256 + 24 + 8; 64 Kib of 128 bytes in 1 us.
        check(&link, 32_000 * 128 / 156);
        check(&SimLink { payload: 256, ..link.clone() }, 32_000 * 256 / 288);
        check(&SimLink { rate: 16_000, ..link.clone() }, 16_000 * 128 / 156);
        // Few credits are worse than a slow link: four TLPs in each round trip.
        check(&SimLink { credits: 4, ..link.clone() }, 4 * 128 * 8);
        check(&SimLink { credits: 4, hops: 2, ..link.clone() }, 2 * 128 * 8);
        let one = carried(&link, 4);
        assert_eq!((one.packets, one.duration), (1, Duration::from_nanos(500 + 8)));
        assert_eq!(carried(&link, 0).packets, 1);
    }

    #[test]
    fn directions_share_what_there_is() {
        let mut random = SplitMix64::new(1);
        let shared = SimLink::default();
        let own = SimLink { is_shared: false, ..shared.clone() };
        let mut took = |link: &SimLink, there: usize, back: usize| {
            link.exchange(&mut vec![0; there], &mut vec![0; back], &mut random).unwrap().duration
        };
        let one_way = took(&shared, MIB, 0);
        assert_eq!(took(&shared, 0, MIB), one_way);
        assert_eq!(took(&shared, MIB, MIB), one_way * 2);
        assert_eq!(took(&own, MIB, MIB), one_way);
    }

    #[test]
    fn flipped_bits_cost_time_and_nothing_else() {
        let sent: Vec<u8> = (0..MIB).map(|at| at as u8).collect();
        let link = SimLink { bit_errors: 1e-6, ..SimLink::default() };
        let mut came = sent.clone();
        let slow = link.carry(&mut came, &mut SplitMix64::new(1)).unwrap();
        // 8,192 TLPs of 1,248 bits.
        assert!((5..=20).contains(&slow.replays), "{slow:?}");
        assert!(slow.duration > carried(&SimLink::default(), MIB).duration && slow.retrainings == 0);
        assert_eq!(came, sent);
        // The same seed, the same way.
        assert_eq!(link.carry(&mut came, &mut SplitMix64::new(1)), Ok(slow));
        // Half get through at the first try: the link is retrained, and stays up.
        let bad = carried(&SimLink { bit_errors: 5e-4, ..SimLink::default() }, MIB / 64);
        assert!(bad.retrainings > 0, "{bad:?}");
        let down = SimLink { bit_errors: 0.1, ..SimLink::default() };
        let down = down.carry(&mut [0; 4], &mut SplitMix64::new(1)).unwrap_err();
        assert_eq!(down.retrainings, u64::from(RETRAININGS));
    }

    #[test]
    fn what_slips_through_is_in_the_bytes() {
        let sent = vec![0_u8; MIB];
        let mut came = sent.clone();
        let link = SimLink { corruption: 1e-3, ..SimLink::default() };
        let carried = link.carry(&mut came, &mut SplitMix64::new(1)).unwrap();
        let wrong: u32 = came.iter().map(|byte| byte.count_ones()).sum();
        assert!(
            (1..=30).contains(&carried.corrupted) && u64::from(wrong) == carried.corrupted,
            "{carried:?}"
        );
        let all = SimLink { corruption: 1.0, ..SimLink::default() };
        assert_eq!(all.carry(&mut came, &mut SplitMix64::new(1)).unwrap().corrupted, 8192);
        assert_eq!(all.carry(&mut [], &mut SplitMix64::new(1)).unwrap().corrupted, 0);
    }
}
