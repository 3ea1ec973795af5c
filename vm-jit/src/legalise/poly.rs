//! Coefficients: polynomials through Chebyshev nodes where nothing else is said, lowest power first, and constants in parts. As bits.

/// (e^r − 1 − r) / r² for |r| ≤ ½ ln 2.
pub(crate) const EXP: [u64; 11] = [
    0x3fe0_0000_0000_0000,
    0x3fc5_5555_5555_5557,
    0x3fa5_5555_5555_5556,
    0x3f81_1111_1111_00be,
    0x3f56_c16c_16c1_62c3,
    0x3f2a_01a0_1abf_85ab,
    0x3efa_01a0_1a6e_1e2a,
    0x3ec7_1de0_1fdb_f9ca,
    0x3e92_7e4d_b46c_ddd1,
    0x3e5a_f4e5_5437_7204,
    0x3e21_f734_0dbc_337e,
];
/// The same for f32.
pub(crate) const EXP_F32: [u32; 5] = [0x3f00_0000, 0x3e2a_aa6e, 0x3d2a_aa8d, 0x3c09_05d1, 0x3ab6_889e];
/// (2^r − 1) / r for |r| ≤ ½.
pub(super) const EXP2: [u64; 13] = [
    0x3fe6_2e42_fefa_39ef,
    0x3fce_bfbd_ff82_c58f,
    0x3fac_6b08_d704_a0c0,
    0x3f83_b2ab_6fba_4e7b,
    0x3f55_d87f_e78a_6732,
    0x3f24_3091_2f86_ac5b,
    0x3eef_fcbf_c588_9cb0,
    0x3eb6_2c02_2460_176e,
    0x3e7b_5253_d41f_a178,
    0x3e3e_4cf0_3bac_04a7,
    0x3dfe_8ca8_dd46_5e8b,
    0x3dbc_4b5b_04b1_e8f9,
    0x3d78_2192_1790_6555,
];
/// The same for f32.
pub(crate) const EXP2_F32: [u32; 7] =
    [0x3f31_7218, 0x3e75_fdf0, 0x3d63_5847, 0x3c1d_950e, 0x3aae_c3cf, 0x3922_2000, 0x3780_52c1];
/// (atanh s − s) / s³ of s², s up to (√2 − 1) / (√2 + 1).
pub(super) const ATANH: [u64; 9] = [
    0x3fd5_5555_5555_5555,
    0x3fc9_9999_9999_9998,
    0x3fc2_4924_9249_296b,
    0x3fbc_71c7_1c64_9fde,
    0x3fb7_45d1_7d4c_787a,
    0x3fb3_b137_ac25_5568,
    0x3fb1_11d3_a829_3d5b,
    0x3fad_ebb7_d0c2_6307,
    0x3fae_6ce4_a6f7_38fd,
];
/// The same to 2^-35, for f32.
pub(super) const ATANH_SHORT: [u64; 4] =
    [0x3fd5_5555_54b9_ea73, 0x3fc9_999e_bdd7_89fc, 0x3fc2_45c0_add8_25b2, 0x3fbd_ddad_ec72_b27a];
/// (sin r − r) / r³ of r², |r| ≤ π/4.
pub(super) const SIN: [u64; 7] = [
    0xbfc5_5555_5555_5555,
    0x3f81_1111_1111_1110,
    0xbf2a_01a0_1a01_992f,
    0x3ec7_1de3_a545_f836,
    0xbe5a_e645_410e_937b,
    0x3de6_1217_d925_2c03,
    0xbd6a_b16f_5caa_198a,
];
/// (cos r − 1 + r²/2) / r⁴ of r², |r| ≤ π/4.
pub(super) const COS: [u64; 7] = [
    0x3fa5_5555_5555_5555,
    0xbf56_c16c_16c1_6c16,
    0x3efa_01a0_1a01_9d06,
    0xbe92_7e4f_b771_25c5,
    0x3e21_eed8_deac_3dfe,
    0xbda9_394b_8bd5_0ae1,
    0x3d2a_b779_550c_8d9b,
];
/// (tanh x − x) / x³ of x², |x| ≤ 0.65.
pub(super) const TANH: [u64; 14] = [
    0xbfd5_5555_5555_5555,
    0x3fc1_1111_1111_1111,
    0xbfab_a1ba_1ba1_b8e8,
    0x3f96_64f4_882b_7ee1,
    0xbf82_26e3_55c2_7cfc,
    0x3f6d_6d3d_0345_5236,
    0xbf57_da35_390f_09e8,
    0x3f43_5570_95e8_2e57,
    0xbf2f_5634_6323_7d20,
    0x3f19_5a1c_7533_81dd,
    0xbf04_4574_8193_e212,
    0x3eee_acde_43f7_154e,
    0xbed3_3e23_8753_87b4,
    0x3eac_5c86_bd66_7365,
];
/// The same for f32, |x| ≤ 0.62: the least maximal relative error of tanh, 2^-32.7, by Remez exchange, rounded to f32.
pub(crate) const TANH_F32: [u32; 6] =
    [0xbeaa_aaaa, 0x3e08_8839, 0xbd5c_f886, 0x3cb1_d3f3, 0xbc06_4437, 0x3b0d_89fb];
/// Where one polynomial of erf of f32 ends and the other begins.
pub(crate) const ERF_SPLIT_F32: f64 = 0.92;
/// erf x / x − 1 of x², for f32 up to [`ERF_SPLIT_F32`]: the least maximal relative error of erf, 2^-25.8, by Remez exchange, with 2/√π − 1
/// given, and rounded to f32.
pub(crate) const ERF_F32: [u32; 6] =
    [0x3e03_75d4, 0xbec0_9381, 0x3de7_0ec0, 0xbcdb_56ee, 0x3ba3_f236, 0xba1e_372f];
/// ln(1 − erf x) / x + 1, for f32 from there to 4: likewise, 2^-30.3.
pub(crate) const ERF_POWER_F32: [u32; 7] =
    [0xbe03_bc6e, 0xbf22_9947, 0xbdd9_92b8, 0x3cc2_a8a8, 0xbb6e_b651, 0x39a9_3dfd, 0xb73c_6e0f];

/// erf x / x of x², |x| ≤ 1.
pub(super) const ERF: [u64; 15] = [
    0x3ff2_0dd7_5042_9b6d,
    0xbfd8_1274_6b03_79e7,
    0x3fbc_e2f2_1a04_2be2,
    0xbf9b_82ce_3128_8b47,
    0x3f75_65bc_d0e6_a2ee,
    0xbf4c_02db_4003_5f1e,
    0x3f1f_9a32_6f7a_c5b1,
    0xbeef_4d25_bf9a_f03a,
    0x3ebb_9e6c_38e5_cf3d,
    0xbe85_f73c_3bf1_4b91,
    0x3e4f_cbb3_12b4_8443,
    0xbe15_17ce_02f1_265f,
    0x3dd9_a0fc_b5e2_2c5b,
    0xbd9b_40e7_abf9_f000,
    0x3d53_c01f_d3a7_4542,
];
/// erf of x less the middle, for x from 1 to 2, 2 to 3, 3 to 4 and 4 to 6.
pub(super) const ERF_PARTS: [[u64; 20]; 4] = [
    [
        0x3fee_ea55_5713_7ae0,
        0x3fbe_7237_26b8_24a9,
        0xbfc6_d5a9_5d0a_1b7e,
        0x3fc1_c2a0_2beb_6ab8,
        0xbfa6_d5a9_5d0a_1bcf,
        0xbf8e_7237_26b8_22bd,
        0x3f93_ca3d_72c4_9e35,
        0xbf73_6d73_a61e_7fac,
        0xbf63_5ae4_e3af_e5fe,
        0x3f5c_0380_c3e7_a9e9,
        0xbf18_5b5f_21f6_c77b,
        0xbf30_acef_99f3_d7e1,
        0x3f14_5dae_b145_d51e,
        0x3ef2_d3e0_38ae_8dd8,
        0xbeed_8d80_830f_91bb,
        0x3ea3_f349_499a_ffe8,
        0x3eb9_adf4_23e9_9bbc,
        0xbe96_5a92_4a98_89e4,
        0xbe7b_1419_858b_c4df,
        0x3e67_adde_0bca_f287,
    ],
    [
        0x3fef_fcaa_8f4c_9bea,
        0x3f61_d831_70fb_f6fe,
        0xbf76_4e3d_cd3a_f4ba,
        0x3f81_19da_0c46_cc24,
        0xbf81_a89b_97ce_ac96,
        0x3f79_0e81_283f_f8b5,
        0xbf66_ecdb_f67c_65f1,
        0x3f41_c610_bc6b_d299,
        0x3f31_1551_df04_4b95,
        0xbf30_6717_81e2_80a1,
        0x3f14_a844_9333_9eee,
        0x3ed5_8bb5_d827_8748,
        0xbeed_872a_abe9_6ecd,
        0x3ed3_ad85_533f_ab85,
        0x3e88_5e65_ab37_32c9,
        0xbea5_97ec_5a05_0063,
        0x3e87_f62d_9bbd_b89a,
        0x3e58_740b_4b8e_7e0e,
        0xbe58_01ee_9921_7fe9,
        0x0000_0000_0000_0000,
    ],
    [
        0x3fef_fffe_710d_565e,
        0x3ed6_a597_219a_93d4,
        0xbef3_d0e4_3d67_34d9,
        0x3f06_2cce_a63c_b29a,
        0xbf11_c077_21ad_ce45,
        0x3f15_86ba_fc9b_36e3,
        0xbf14_6153_fb62_cc1c,
        0x3f0e_827f_afc9_68b1,
        0xbf01_f630_5691_2aba,
        0x3ef0_1352_5a7d_acb3,
        0xbed3_773e_12d9_1261,
        0x3e9d_d802_1aae_75ea,
        0x3e9d_c69f_5549_0dbf,
        0xbe94_3f06_e7ca_e34d,
        0x3e78_ddc3_5b8e_5308,
        0xbe38_3ecc_db1d_f23f,
        0xbe43_43ba_0050_50ef,
        0x3e30_9106_bf93_76f0,
        0x0000_0000_0000_0000,
        0x0000_0000_0000_0000,
    ],
    [
        0x3fef_ffff_ffff_c9e8,
        0x3db1_3af4_f2ce_071e,
        0xbdd5_89b0_8415_a15d,
        0x3df1_96d9_eb79_ef3f,
        0xbe05_16da_9f8a_7ffd,
        0x3e13_c51e_0be7_8916,
        0xbe1e_232c_d4dc_bbf3,
        0x3e23_2c6c_2182_9531,
        0xbe24_bd77_763f_cc3a,
        0x3e23_5089_acea_9faf,
        0xbe1f_3d0a_830a_289b,
        0x3e16_1660_e6c6_6061,
        0xbe0b_6bda_6b6c_3d25,
        0x3dfd_a82d_9202_a3d4,
        0xbdeb_7acc_e037_967f,
        0x3dd6_430c_23f4_f88a,
        0xbdc0_71eb_b0a1_b381,
        0x3da1_6328_ed86_b40c,
        0xbd20_675c_4060_df27,
        0xbd61_35df_9bb7_7906,
    ],
];
/// A word of zeros, then the binary digits of 2/π, the first highest.
pub(super) const TWO_OVER_PI: [u64; 21] = [
    0x0000_0000_0000_0000,
    0xa2f9_836e_4e44_1529,
    0xfc27_57d1_f534_ddc0,
    0xdb62_9599_3c43_9041,
    0xfe51_63ab_debb_c561,
    0xb724_6e3a_424d_d2e0,
    0x0649_2eea_09d1_921c,
    0xfe1d_eb1c_b129_a73e,
    0xe882_35f5_2ebb_4484,
    0xe99c_7026_b45f_7e41,
    0x3991_d639_8353_39f4,
    0x9c84_5f8b_bdf9_283b,
    0x1ff8_97ff_de05_980f,
    0xef2f_118b_5a0a_6d1f,
    0x6d36_7ecf_27cb_09b7,
    0x4f46_3f66_9e5f_ea2d,
    0x7527_bac7_ebe5_f17b,
    0x3d07_39f7_8a52_92ea,
    0x6bfb_5fb1_1f8d_5d08,
    0x5603_3046_fc7b_6bab,
    0xf0cf_bc20_9af4_361d,
];
/// ln 2 in two parts.
pub(crate) const LN_2: [u64; 2] = [0x3fe6_2e42_fefa_39ef, 0x3c7a_bc9e_3b39_803f];
/// ln 2 in two parts, the first with so few bits that its product with an exponent is exact.
pub(super) const LN_2_SHORT: [u64; 2] = [0x3fe6_2e42_fee0_0000, 0x3dea_39ef_3579_3c76];
/// log2 e in two parts.
pub(super) const LOG2_E: [u64; 2] = [0x3ff7_1547_652b_82fe, 0x3c77_77d0_ffda_0d24];
/// π/2 in three parts.
pub(super) const HALF_PI: [u64; 3] = [0x3ff9_21fb_5444_2d18, 0x3c91_a626_3314_5c07, 0xb91f_1976_b7ed_8fbc];

#[cfg(test)]
pub(crate) mod tests {
    use super::{ERF_F32, ERF_POWER_F32, ERF_SPLIT_F32};
    use vm_ir::Scalar;
    use vm_ir::op::Opcode;
    use vm_ir::semantics::eval;

    /// A polynomial as kernels compute it.
    pub(crate) fn value(coefficients: &[u32], x: f32) -> f32 {
        coefficients.iter().rev().fold(0.0, |sum, bits| f32::mul_add(sum, x, f32::from_bits(*bits)))
    }

    /// How many ulps erf is off at most by the polynomial `near` up to `split`, and `far` above, for every 4,099th f32 up to 8.
    pub(crate) fn worst_of_erf(near: &[u32], split: f32, far: impl Fn(f32) -> f32) -> f64 {
        let sizes = (f32::MIN_POSITIVE.to_bits()..8f32.to_bits()).step_by(4099).map(f32::from_bits);
        sizes.fold(0f64, |worst, x| {
            let found = if x > split { far(x) } else { f32::mul_add(value(near, x * x), x, x) };
            let truth = eval(Opcode::Erf, Scalar::F64, Scalar::F64, &[f64::from(x).to_bits()]);
            let truth = f64::from_bits(truth.unwrap());
            let nearest = truth as f32;
            worst.max((f64::from(found) - truth).abs() / f64::from(nearest - nearest.next_down()))
        })
    }

    /// With an exact exp: kernels' own adds its error.
    #[test]
    fn erf_of_f32_is_within_an_ulp() {
        let far = |x: f32| {
            let most = x.min(4.0);
            1.0 - f64::from(f32::mul_add(value(&ERF_POWER_F32, most), most, -most)).exp() as f32
        };
        let worst = worst_of_erf(&ERF_F32, ERF_SPLIT_F32 as f32, far);
        assert!(worst < 1.0, "{worst} ulps");
    }
}
