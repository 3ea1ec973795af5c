//! How hot a simulated GPU gets: one body that is heated by what it does, and cooled by the air.

use std::time::Duration;

/// A GPU's cooler and what it heats up with.
#[derive(Clone, Debug, PartialEq)]
pub struct SimHeat {
    /// The air in °C.
    pub ambient: f64,
    /// Thermal resistance to the air with the fan on, and without it, in K/W.
    pub resistance: (f64, f64),
    /// Heat capacity in J/K.
    pub capacity: f64,
    /// Watts that it takes idle, and at work.
    pub power: (f64, f64),
    /// Whether the fan turns.
    pub fan: bool,
    /// In °C.
    celsius: f64,
}

impl Default for SimHeat {
    /// 25 °C of air; 27 °C idle and 70 °C at 300 W, reached in minutes; past 90 °C in three minutes without a fan.
    fn default() -> Self {
        Self {
            ambient: 25.0,
            resistance: (0.15, 0.6),
            capacity: 600.0,
            power: (15.0, 300.0),
            fan: true,
            celsius: 25.0,
        }
    }
}

impl SimHeat {
    /// Lets time pass at work or idle, or without power.
    pub fn run(&mut self, time: Duration, is_on: bool, is_busy: bool) {
        let power = match (is_on, is_busy) {
            (false, _) => 0.0,
            (true, false) => self.power.0,
            (true, true) => self.power.1,
        };
        let resistance = if self.fan { self.resistance.0 } else { self.resistance.1 };
        // Implicit Euler: stable however long the steps are, and of operations that are the same on every machine.
        let steps = (time.as_secs() + 1).min(60);
        let step = time.as_secs_f64() / steps as f64;
        for _ in 0..steps {
            let gain = step / self.capacity;
            let flow = gain * (power + self.ambient / resistance);
            self.celsius = (self.celsius + flow) / (1.0 + gain / resistance);
        }
    }

    /// Its temperature in thousandths of a degree Celsius.
    pub fn millidegrees(&self) -> i32 {
        (self.celsius * 1000.0) as i32
    }

    /// Makes it as hot as this, in thousandths of a degree Celsius.
    pub fn set(&mut self, millidegrees: i32) {
        self.celsius = f64::from(millidegrees) / 1000.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After so many seconds from 25 °C.
    fn check(seconds: u64, is_busy: bool, fan: bool, wanted: std::ops::Range<i32>) {
        let mut heat = SimHeat { fan, ..SimHeat::default() };
        heat.run(Duration::from_secs(seconds), true, is_busy);
        assert!(wanted.contains(&heat.millidegrees()), "{seconds} s: {}", heat.millidegrees());
    }

    #[test]
    fn it_gets_as_hot_as_its_power_and_its_fan_say() {
        check(0, true, true, 25_000..25_001);
        check(3600, false, true, 27_200..27_300);
        check(3600, true, true, 69_900..70_001);
        // RC is 90 s: 1 - 1/e of the way.
        check(90, true, true, 53_000..54_000);
        check(3600, true, false, 200_000..206_000);
        // It cools when it is off, however long the step is.
        let mut heat = SimHeat::default();
        heat.set(95_000);
        assert_eq!(heat.millidegrees(), 95_000);
        heat.run(Duration::from_secs(1_000_000), false, true);
        assert_eq!(heat.millidegrees(), 25_000);
    }
}
