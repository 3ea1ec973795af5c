/* The signatures of the specification, of f32; those of bf16 and f16 have a suffix and uint16_t for T.
 * Where a line begins with f32 there are none. */
int32_t cuda_gemm(const T *A, const T *B, T *C, int M, int N, int K, float alpha, float beta, void *stream);
int32_t cuda_gemm_batched(const T *A, const T *B, T *C, int batch, int M, int N, int K, float alpha, float beta, void *stream);
int32_t cuda_mqa_attention(const T *Q, const T *K, const T *V, T *output, const float *mask, int batch, int seq_len, int n_heads, int head_dim, float scale, void *stream);
int32_t cuda_flash_attention(const T *Q, const T *K, const T *V, T *output, int batch, int seq_len, int n_heads, int head_dim, float scale, int is_causal, void *stream);
int32_t cuda_rope(T *q, T *k, const float *freqs, int batch, int seq_len, int n_heads, int head_dim, void *stream);
int32_t cuda_adamw_step(T *param, const T *grad, float *m, float *v, float lr, float beta1, float beta2, float eps, float weight_decay, int step, int64_t size, void *stream);
int32_t cuda_grad_clip(T *grad, float *partial_norms, float *total_norm, float clip_norm, int64_t size, void *stream);
f32 cuda_scatter_add(const float *input, const int32_t *indices, float *output, int64_t count, int64_t dim, int64_t rows, void *stream);
int32_t cuda_zero_grad(T *grad, int64_t size, void *stream);
f32 cuda_aux_loss_forward(const float *router_probs, const int32_t *expert_indices, float *aux_loss, float *f_counts, float *p_means, int batch_seq, int n_experts, int top_k, float alpha, void *stream);
