/* The signatures of the specification, of f32; those of bf16 and f16 have a suffix and uint16_t for T. */
int32_t cuda_gemm(const T *A, const T *B, T *C, int M, int N, int K, float alpha, float beta, void *stream);
int32_t cuda_gemm_batched(const T *A, const T *B, T *C, int batch, int M, int N, int K, float alpha, float beta, void *stream);
int32_t cuda_mqa_attention(const T *Q, const T *K, const T *V, T *output, const float *mask, int batch, int seq_len, int n_heads, int head_dim, float scale, void *stream);
int32_t cuda_flash_attention(const T *Q, const T *K, const T *V, T *output, int batch, int seq_len, int n_heads, int head_dim, float scale, int is_causal, void *stream);
