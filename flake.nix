{
  description = "roofline-kernels: Hugging Face Hub kernels in pure Triton";

  # Release of kernel-builder that matches `kernels` in requirements-dev.txt. Its binary cache
  # (`cachix use huggingface`) spares a build of every supported PyTorch.
  inputs.kernel-builder.url = "github:huggingface/kernels/v0.17.2";

  # For each kernel that build.toml lists, on each system that kernel-builder supports:
  #
  #   nix build .#rmsnorm-bundle             every variant of its backends
  #   nix run .#rmsnorm-build-and-upload     the same, committed to the kernel's repository on the Hub
  #   nix develop .#rmsnorm                  shell to develop in
  #   nix develop .#rmsnorm-test             shell with the kernel installed, to run its tests in
  #   nix build .#rmsnorm.backendBundle.cuda anything else kernel-builder offers, below the kernel's name
  outputs =
    { self, kernel-builder }:
    let
      manifest = builtins.fromTOML (builtins.readFile ./build.toml);

      kernels = map (name: {
        inherit name;
        outputs = kernel-builder.lib.genKernelFlakeOutputs {
          inherit self;
          path = ./. + "/${name}";
        };
      }) manifest.monorepo.kernels;

      # kernel-builder answers for one kernel, { <system> = outputs; }: merge those of all kernels,
      # with `rename name outputs` in place of each kernel's outputs.
      merge =
        output: rename:
        builtins.zipAttrsWith (_system: builtins.foldl' (all: one: all // one) { }) (
          map (
            kernel: builtins.mapAttrs (_system: rename kernel.name) kernel.outputs.${output}
          ) kernels
        );
    in
    {
      packages = merge "packages" (
        name: packages: {
          "${name}-bundle" = packages.bundle;
          "${name}-build-and-upload" = packages.build-and-upload;
        }
      );

      devShells = merge "devShells" (
        name: shells: {
          ${name} = shells.default;
          "${name}-test" = shells.test;
        }
      );

      # Some of kernel-builder's outputs are sets of packages, which only this output may hold.
      legacyPackages = merge "packages" (name: packages: { ${name} = packages; });
    };
}
